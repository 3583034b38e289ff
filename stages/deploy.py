"""Stage `deploy`: a tritonserver that serves the repository until it is stopped."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import JobSettings, Stage, StageError, Summary
from stages.progress import Progress, read_json, write_json
from stages.record import now

if TYPE_CHECKING:
    from inference.serving.server import TritonServer

ENDPOINT_NAME = "endpoint.json"
# Appears beside the address when nobody needs the server any more.
STOP_NAME = "stop_requested"
# Names the job to everything it starts; the launcher sets it.
JOB_ID_VARIABLE = "SLIPWAY_JOB_ID"
PORT_KEYS = {
    "http": "deploy.http_port",
    "grpc": "deploy.grpc_port",
    "metrics": "deploy.metrics_port",
}
ENGINES = ("pytorch",)
_POLL_S = 0.5
# Besides the time to drain: the models unload.
_UNLOAD_S = 20.0


@dataclass(frozen=True)
class DeployConfig:
    """What is served and where.

    Attributes:
        repository: folder of the Triton repository.
        model_name: the model that takes token ids.
        host: address that the server listens on.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        ready_timeout_s: the start fails when the models are not ready by then.
        drain_s: time that running requests get to finish when the server stops.
    """

    repository: Path
    model_name: str
    tp_size: int = 1
    pp_size: int = 1
    engine: str = "pytorch"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    ready_timeout_s: float = 300.0
    drain_s: float = 30.0

    @property
    def ensemble_name(self) -> str | None:
        """The model that takes text, if the repository has it."""
        return "ensemble" if (self.repository / "ensemble").is_dir() else None


@dataclass(frozen=True)
class Endpoint:
    """Where a server can be reached, as published in endpoint.json.

    Attributes:
        http, grpc, metrics: ports.
        model, ensemble: Triton models for token ids and for text.
        ready_at: UTC, ISO 8601.
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


class DeployStage(Stage):
    """Runs a server and publishes its address once it is ready."""

    name = "deploy"

    def __init__(self, job: JobSettings, config: DeployConfig) -> None:
        super().__init__(job)
        self.config = config

    @property
    def endpoint_path(self) -> Path:
        """Where the address of the running server is published."""
        return self.job.folder / ENDPOINT_NAME

    def check(self) -> list[str]:
        """Return the problems of engine, ports and times."""
        return check_deploy(self.config)

    def outputs(self) -> list[Path]:
        """Return nothing: a server leaves nothing behind."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return nothing: a server is never finished earlier."""
        return {}

    def marker_path(self) -> Path | None:
        """Return None: a server is never finished earlier."""
        return None

    def readiness_path(self) -> Path:
        """Return the file that appears once the server is ready."""
        return self.endpoint_path

    def ask_to_stop(self) -> bool:
        """Leave word for the server to end."""
        self.endpoint_path.with_name(STOP_NAME).touch()
        return True

    def other_logs(self, job_id: str) -> list[Path]:
        """Return the server's log."""
        return [server_log(self.job.folder, job_id)]

    def stop_grace_s(self) -> float:
        """Return the time to drain, and some more for the models to unload."""
        return self.config.drain_s + _UNLOAD_S

    def run(self, progress: Progress) -> Summary:
        """Serve until a signal or the time limit.

        Raises:
            StageError: the server ended by itself.
            ServerStartError: it did not become ready.
        """
        started = time.monotonic()
        limit_s = self.job.resources.time_limit_min * 60 - self.config.drain_s - self.job.warning_s
        stop_path = self.endpoint_path.with_name(STOP_NAME)
        for stale in (self.endpoint_path, stop_path):
            stale.unlink(missing_ok=True)
        reason = "stopped"
        with serving(self.config, self.job.folder, progress) as (server, endpoint):
            write_json(self.endpoint_path, asdict(endpoint))
            with contextlib.suppress(KeyboardInterrupt):
                reason = _serve(server, progress, stop_path, until=started + max(limit_s, 0.0))
            # A signal that comes while the server is already stopping changes nothing.
            with contextlib.suppress(KeyboardInterrupt):
                progress.update("stopping")
                _withdraw(self.endpoint_path, endpoint.job_id)
                server.stop(drain_s=self.config.drain_s)
            _withdraw(self.endpoint_path, endpoint.job_id)
        return {"served_s": round(time.monotonic() - started, 1), "ended": reason}


def check_deploy(config: DeployConfig) -> list[str]:
    """Return the problems of a server's configuration."""
    problems = []
    if config.engine not in ENGINES:
        problems.append(
            f"deploy.engine={config.engine} is not served; use one of {', '.join(ENGINES)}."
        )
    ports = {key: getattr(config, f"{name}_port") for name, key in PORT_KEYS.items()}
    problems += [
        f"{key}={port} is not a port; use 1 to 65535, or 0 for any free one."
        for key, port in ports.items()
        if not 0 <= port <= 65535
    ]
    chosen = [port for port in ports.values() if port]
    if len(set(chosen)) < len(chosen):
        told = ", ".join(f"{key}={port}" for key, port in ports.items())
        problems.append(f"{told}: the three ports must differ; 0 takes any free one.")
    problems += [
        f"deploy.{field}={value} must be positive (seconds)."
        for field, value in (("ready_timeout_s", config.ready_timeout_s),)
        if value <= 0
    ]
    if config.drain_s < 0:
        problems.append(f"deploy.drain_s={config.drain_s} must not be negative (seconds).")
    return problems


@contextmanager
def serving(
    config: DeployConfig, folder: Path, progress: Progress
) -> Iterator[tuple[TritonServer, Endpoint]]:
    """Run a server for the duration of the block and yield it, ready, with its address.

    Its log is `tritonserver-<job id>.log` in `folder`.
    """
    from inference.serving.server import TritonServer

    job_id = os.environ.get(JOB_ID_VARIABLE, str(os.getpid()))
    server = TritonServer(
        config.repository,
        http_port=config.http_port,
        grpc_port=config.grpc_port,
        metrics_port=config.metrics_port,
        host=config.host,
        log_path=server_log(folder, job_id),
        port_keys=PORT_KEYS,
    )
    with server:
        progress.update("starting the server")
        server.start(timeout_s=config.ready_timeout_s, progress=progress.update)
        yield (
            server,
            Endpoint(
                host=_reachable_host(server),
                http=server.http_port,
                grpc=server.grpc_port,
                metrics=server.metrics_port,
                model=config.model_name,
                ensemble=config.ensemble_name,
                job_id=job_id,
                tp=config.tp_size,
                pp=config.pp_size,
                ready_at=now(),
            ),
        )


def server_log(folder: Path, job_id: str) -> Path:
    """Return where the server of a job writes its log."""
    return folder / f"tritonserver-{job_id}.log"


def read_endpoint(path: Path) -> Endpoint | None:
    """Return the published address, or None while there is none."""
    values: Mapping[str, Any] | None = read_json(path)
    return None if values is None else replace(_NOWHERE, **values)


_NOWHERE = Endpoint("", 0, 0, 0, "", None, "", 0, 0, "")


def _serve(server: TritonServer, progress: Progress, stop_path: Path, *, until: float) -> str:
    """Block while the server serves; return why it should stop now."""
    progress.update(f"serving HTTP on {server.http_url}, gRPC on {server.grpc_url}")
    while time.monotonic() < until:
        if server.poll() is not None:
            tail = "\n".join(f"  | {line}" for line in server.log_tail())
            raise StageError(
                f"tritonserver ended by itself with status {server.poll()}; "
                f"last lines of {server.log_path}:\n{tail}"
            )
        if stop_path.exists():
            stop_path.unlink()
            return "no longer needed"
        time.sleep(_POLL_S)
    return "time limit"


def _reachable_host(server: TritonServer) -> str:
    """Return the address for clients: this node's name when the server listens to all."""
    if server.connect_host == server.host:
        return server.host
    node = os.environ.get("SLURMD_NODENAME", "")
    for name in (node, socket.gethostname()):
        with contextlib.suppress(OSError):
            if name and socket.getaddrinfo(name, None):
                return name
    return server.connect_host


def _withdraw(path: Path, job_id: str) -> None:
    """Remove the published address unless a later job has published its own."""
    endpoint = read_endpoint(path)
    if endpoint is not None and endpoint.job_id == job_id:
        path.unlink(missing_ok=True)
