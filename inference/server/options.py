"""The options that tritonserver is started with."""

from __future__ import annotations

from collections.abc import Mapping

from inference.gateway.sockets import ServerSockets

# The server itself waits this long for running requests; `stop` sets the limit that counts.
_EXIT_TIMEOUT_S = 3600


def server_options(repository: str, sockets: ServerSockets) -> list[str]:
    """Return the options of a server of this project, which listens on Unix sockets alone.

    Loading and unloading is open there, to the sockets' owner; the gateway passes none of it on.
    """
    return [
        f"--model-repository={repository}",
        *sockets.server_options(),
        # Lets a model whose workers died take itself out of service.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A model that fails stays listed with its reason instead of ending the server.
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        "--disable-auto-complete-config",
    ]


def old_server_options(repository: str, ports: Mapping[str, int]) -> list[str]:
    """Return options that every release of tritonserver knows.

    Models are loaded once: NVIDIA's C++ backend cannot load a model again in the same process.
    """
    return [
        f"--model-repository={repository}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
    ]


def silent_server_options(repository: str) -> list[str]:
    """Return the options of a further node's server, which serves through that of the first."""
    closed = [f"--allow-{name}=false" for name in ("http", "grpc", "metrics")]
    return [f"--model-repository={repository}", *closed]
