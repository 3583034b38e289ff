"""The published address of a running server, and the files that ask it to end or reload."""

from dataclasses import dataclass, field
from pathlib import Path

from inference.system.ports import host_and_port
from stages.progress import DamagedFileError, read_as, write_json
from stages.record import locked

ENDPOINT_NAME = "endpoint.json"
# Written next to the address when the server is no longer needed. It may hold a job id.
STOP_NAME = "stop_requested"
# Written there when the server should reload its repository. It may hold the path of another
# repository, whose weights the running server then loads.
RELOAD_NAME = "reload_requested"


@dataclass(frozen=True)
class ServerEndpoint:
    """The address of a server, as published in endpoint.json.

    Attributes:
        host: name or address of the node that serves; with several nodes, that of rank 0.
        http, grpc, metrics: ports; grpc is 0 for an engine that speaks only OpenAI's protocol.
        openai: port of OpenAI's protocol; None without it.
        model, ensemble: Triton models for token ids and for text.
        ready_at: UTC, ISO 8601.
        nodes: number of nodes that share the model.
        restarts: how often this job has restarted the server.
        uses_tls: whether clients must use TLS.
        served: identity of the served weights (`served_identity`); empty for another engine.
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
    uses_tls: bool = False
    served: dict[str, str] = field(default_factory=dict)

    @property
    def ports(self) -> dict[str, int]:
        """The ports by name; 0 for OpenAI's protocol if it is not served."""
        if not self.grpc:
            return {"http": self.http}
        found = {"http": self.http, "grpc": self.grpc, "metrics": self.metrics}
        return found | {"openai": self.openai or 0}

    def at(self, port: int) -> str:
        """Return `host:port` as clients write it."""
        return host_and_port(self.host, port)

    def address(self, protocol: str) -> str | None:
        """Return `host:port` for clients of a protocol; None if the server does not speak it."""
        port = {"http": self.http, "grpc": self.grpc}.get(protocol, self.openai)
        return self.at(port) if port else None

    def publish(self, path: Path) -> None:
        """Write the address for clients."""
        with locked(path):
            write_json(path, self)

    def withdraw(self, path: Path) -> None:
        """Remove the published address, even a damaged one, unless it is another job's."""
        with locked(path):
            if published_by(path) in (self.job_id, None) and not path.is_dir():
                path.unlink()

    def __str__(self) -> str:
        scheme = "https" if self.uses_tls else "http"
        openai = f", OpenAI on {scheme}://{self.at(self.openai)}/v1" if self.openai else ""
        if not self.grpc:
            return f"OpenAI on {scheme}://{self.at(self.http)}/v1"
        return f"HTTP on {self.at(self.http)}, gRPC on {self.at(self.grpc)}{openai}"


def read_endpoint(path: Path) -> ServerEndpoint | None:
    """Return the published address, or None if none is published.

    Raises:
        DamagedFileError: the file does not hold an address.
    """
    return read_as(path, ServerEndpoint, "the address of a server")


def published_by(path: Path) -> str | None:
    """Return the id of the job whose address is published: "" if none, None if damaged."""
    try:
        endpoint = read_endpoint(path)
    except DamagedFileError:
        return None
    return "" if endpoint is None else endpoint.job_id


def server_log(folder: Path, job_id: str) -> Path:
    """Return the path of a server's log."""
    return folder / f"server-{job_id}.log"
