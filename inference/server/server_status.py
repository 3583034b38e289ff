"""What a running server says of its models over HTTP, and why a start came to nothing."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.server.local_http import local_opener
from inference.server.server_log import last_lines, short_reason

LOG_TAIL_LINES = 20
_HTTP_TIMEOUT_S = 5.0


class ServerStartError(RuntimeError):
    """The server did not become ready. `reasons` say why, `log_tail` holds its last lines."""

    def __init__(self, summary: str, *, reasons: Sequence[str], log_path: Path) -> None:
        self.reasons = tuple(reasons)
        self.log_path = log_path
        self.log_tail = tuple(last_lines(log_path, LOG_TAIL_LINES))
        parts = [summary, *(f"  {reason}" for reason in reasons)]
        if self.log_tail:
            parts.append(f"last lines of {log_path}:")
            parts += [f"  | {line}" for line in self.log_tail]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class ModelStatus:
    """One line of the server's repository index."""

    name: str
    state: str  # READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded
    reason: str


def model_statuses(address: str) -> list[ModelStatus]:
    """Return the state of every model of the repository. Raises OSError without an answer."""
    entries = json.loads(ask(address, "/v2/repository/index", body=b"{}"))
    return [
        ModelStatus(entry["name"], entry.get("state", ""), short_reason(entry.get("reason", "")))
        for entry in entries
    ]


def ask(address: str, path: str, *, body: bytes | None = None) -> bytes:
    """Return the answer of the server at an address as in `local_http`.

    Raises:
        OSError: There is none, or it is a refusal.
    """
    request = urllib.request.Request(f"http://{address}{path}", data=body)
    with local_opener().open(request, timeout=_HTTP_TIMEOUT_S) as response:
        return bytes(response.read())
