"""Command-line options of tritonserver."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from export_scripts.triton.signature import ENCODERS
from inference.front.sockets import ServerSockets

# Of config.pbtxt. What cannot be read is left to the server, which says what is wrong with it.
_FASTERTRANSFORMER = re.compile(r"""\bbackend\s*:\s*["']fastertransformer["']""")
_ENCODER = re.compile(rf"""\bstring_value\s*:\s*["']({"|".join(ENCODERS)})["']""")
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
    return [
        f"--model-repository={repository}",
        *sockets.server_options(),
        # Lets a model whose workers died take itself out of service.
        "--model-control-mode=explicit",
        "--load-model=*",
        # A failed model stays listed with its reason; the server goes on.
        "--exit-on-error=false",
        "--strict-readiness=true",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        *(() if completes_configs else ("--disable-auto-complete-config",)),
    ]


def leaves_types_to_the_backend(repository: str) -> bool:
    """Return whether a folder holds an encoder made for NVIDIA's backend.

    Such a config.pbtxt does not give the types of its tensors, or not the right ones.
    """
    paths = Path(repository).glob("*/config.pbtxt")
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return any(_FASTERTRANSFORMER.search(text) and _ENCODER.search(text) for text in texts)


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
