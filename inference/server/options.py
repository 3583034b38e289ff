"""Command-line options of tritonserver."""

from collections.abc import Collection, Mapping

from inference.front.sockets import ServerSockets

# The server itself waits this long for running requests; `stop` sets the limit that counts.
_EXIT_TIMEOUT_S = 3600
_EVERYWHERE = "0.0.0.0"  # where tritonserver listens by itself


def server_options(
    repository: str, sockets: ServerSockets, *, completes_configs: bool = False
) -> list[str]:
    """Return the options of a server of this project, which listens on Unix sockets alone.

    The sockets' owner may load and unload models; the front passes no such request on. With
    `completes_configs` backends may fill in what a config.pbtxt leaves out, for which each of their
    models is loaded twice.
    """
    grpc, _, port = str(sockets.grpc).rpartition(":")
    return [
        f"--model-repository={repository}",
        f"--http-address=unix:{sockets.http}",
        f"--grpc-address=unix:{grpc}",
        f"--grpc-port={port}",
        f"--metrics-address=unix:{sockets.metrics}",
        # Lets a model whose workers died take itself out of service.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model stays listed with its reason; the server goes on.
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        *(() if completes_configs else ("--disable-auto-complete-config",)),
    ]


def old_server_options(
    repository: str, ports: Mapping[str, int], *, host: str, known: Collection[str] | None = None
) -> list[str]:
    """Return options that releases of tritonserver for NVIDIA's C++ backend know.

    Models are loaded once: the backend cannot load one again in the same process. `known` are the
    options that the program takes: releases before 23.06 cannot bind the metrics to an address.
    """
    addresses = [f"{name}-address" for name in ports if host != _EVERYWHERE]
    return [
        f"--model-repository={repository}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
        *(f"--{name}={host}" for name in addresses if known is None or name in known),
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
    ]
