"""The published address of a running server, and the files that ask it to end or to reload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.progress import read_json

ENDPOINT_NAME = "endpoint.json"
# Appears next to the address when the server is no longer needed.
STOP_NAME = "stop_requested"
# Appears there when a server of the repository as it is now should take over.
RELOAD_NAME = "reload_requested"


@dataclass(frozen=True)
class ServerEndpoint:
    """The address of a server, as published in endpoint.json.

    Attributes:
        host: name or address of the node that serves; with several nodes, that of rank 0.
        http, grpc, metrics: ports.
        openai: port of OpenAI's protocol; None without it.
        model, ensemble: Triton models for token ids and for text.
        ready_at: UTC, ISO 8601.
        nodes: how many nodes share the model.
        restarts: how often this job has started the server again.
    """

    host: str
    http: int
    grpc: int
    metrics: int
    model: str
    ensemble: str | None
    job_id: str
    tp: int
    pp: int
    ready_at: str
    nodes: int = 1
    restarts: int = 0
    openai: int | None = None

    @property
    def ports(self) -> dict[str, int]:
        """The ports by name, 0 for one that there is not."""
        return {
            "http": self.http,
            "grpc": self.grpc,
            "metrics": self.metrics,
            "openai": self.openai or 0,
        }


_NOWHERE = ServerEndpoint("", 0, 0, 0, "", None, "", 0, 0, "")


def read_endpoint(path: Path) -> ServerEndpoint | None:
    """Return the published address, or None while there is none."""
    values: Mapping[str, Any] | None = read_json(path)
    return None if values is None else replace(_NOWHERE, **values)


def withdraw(path: Path, job_id: str) -> None:
    """Remove the published address unless a later job has published its own."""
    endpoint = read_endpoint(path)
    if endpoint is not None and endpoint.job_id == job_id:
        path.unlink(missing_ok=True)


def server_log(folder: Path, job_id: str) -> Path:
    """Return the path of a server's log."""
    return folder / f"tritonserver-{job_id}.log"
