"""`python -m inference.server`: serve a repository in the foreground, without a deploy stage.

For containers and pods: one process to start, one signal to stop it. It ends with status 1 and the
reason as soon as a model is lost, for its owner to restart it; a server that has lost a model never
becomes ready again.
"""

import argparse
import contextlib
import math
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.front.access import (
    access_of,
    add_access_options,
    add_openai_options,
    openai_of,
)
from inference.server.installation import mpi_start
from inference.server.kinds import AUTO, SERVERS, SLIPWAY, TRITONSERVER, chosen_server
from inference.server.log import ServerStartError, forwarded_log
from inference.server.server import ModelServer
from inference.system.parent_process import StopRequested, stop_signals
from inference.system.ports import DEFAULT_PORTS, TRITON_PORTS

_POLL_S = 0.25
_FASTERTRANSFORMER = "fastertransformer"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (status 0), or until the server fails (status 1)."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    repository = arguments.model_repository
    has_nvidia_backend = arguments.engine == _FASTERTRANSFORMER
    if "://" not in repository and not (repository and Path(repository).is_dir()):
        parser.error(
            f"--model-repository={repository} is not a folder; give one with a folder for each "
            "model, or the URL of an object store"
        )
    openai = openai_of(arguments)
    if openai is not None:
        if problems := openai.problems(prefix="--openai-"):
            parser.error(" ".join(problems))
        if has_nvidia_backend:
            parser.error("--openai-port needs --engine=pytorch")
    needs_triton = has_nvidia_backend or "://" in repository
    kind = chosen_server(arguments.server, needs_triton=needs_triton)
    if kind == SLIPWAY and needs_triton:
        parser.error(
            "--engine=fastertransformer and repositories in object stores need "
            "--server=tritonserver"
        )
    with tempfile.TemporaryDirectory(prefix="slipway-server-") as folder:
        try:
            prefix, variables = mpi_start() if has_nvidia_backend else ((), {})
            server = server_of(
                arguments,
                repository,
                kind=kind,
                log_path=Path(folder) / "server.log",
                openai=openai,
                env=variables,
                prefix=prefix,
                has_nvidia_backend=has_nvidia_backend,
            )
        except ValueError as error:
            parser.error(str(error))
        return serve_until_signal(
            server, ready_timeout_s=arguments.ready_timeout_s, drain_s=arguments.drain_s
        )


def add_server_options(parser: argparse.ArgumentParser, *, host: str = "127.0.0.1") -> None:
    """Add the options that `server_of` reads."""
    parser.add_argument(
        "--host", default=host, help="address to listen on; 0.0.0.0: all interfaces (%(default)s)"
    )
    for name, port in TRITON_PORTS.items():
        words = "(%(default)s); 0 takes a free one"
        parser.add_argument(f"--{name}-port", type=int, default=port, help=words)
    add_access_options(parser)


def server_of(
    arguments: argparse.Namespace,
    repository: Path | str,
    *,
    kind: str = TRITONSERVER,
    log_path: Path,
    **more: Any,
) -> ModelServer:
    """Return a server with the parsed options. Raises ValueError with their problems."""
    access = access_of(vars(arguments))
    if problems := access.problems(prefix="--", joiner="-"):
        raise ValueError("\n".join(problems))
    return ModelServer(
        repository,
        has_triton=kind == TRITONSERVER,
        ports={name: getattr(arguments, f"{name}_port") for name in TRITON_PORTS},
        host=arguments.host,
        log_path=log_path,
        port_keys={"host": "--host"} | {name: f"--{name}-port" for name in DEFAULT_PORTS},
        access=access,
        **more,
    )


def serve_until_signal(server: ModelServer, *, ready_timeout_s: float, drain_s: float) -> int:
    """Serve until SIGTERM or SIGINT, and return 0; return 1 once the server has failed."""
    with stop_signals(signal.SIGTERM, signal.SIGINT), forwarded_log(server.log_path):
        try:
            server.start(timeout_s=ready_timeout_s)
            if server.openai_url is not None:
                sys.stderr.write(f"serving OpenAI's protocol on {server.openai_url}\n")
            while (reason := server.failure()) is None:
                time.sleep(_POLL_S)
            failure = f"the server failed: {reason}"
        except (ServerStartError, OSError) as error:
            failure = str(error)
        except StopRequested:
            server.stop(drain_s=drain_s)
            return 0
        finally:
            server.stop(drain_s=0)
    sys.stderr.write(f"{failure}\n")  # after the last line of the log
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference.server",
        description="Serve a Triton repository until SIGTERM; end with status 1 and the reason "
        "when a model is lost.",
    )
    add = parser.add_argument
    add("--model-repository", required=True, metavar="FOLDER_OR_URL")
    add_openai_options(parser)
    add("--engine", choices=("pytorch", _FASTERTRANSFORMER), default="pytorch",
        help="fastertransformer: NVIDIA's server, through mpirun (%(default)s)")  # fmt: skip
    add("--server", choices=SERVERS, default=AUTO,
        help="slipway: this project's own; tritonserver: the one in TRITON_SERVER, on PATH, or in "
        "nvidia-pytriton; auto: tritonserver if it is in TRITON_SERVER or on PATH "
        "(%(default)s)")  # fmt: skip
    add("--ready-timeout-s", type=_seconds, default=1800.0, help="limit for loading (%(default)g)")
    add("--drain-s", type=_seconds, default=60.0,
        help="limit for running requests at shutdown (%(default)g)")  # fmt: skip
    add_server_options(parser)
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"{text} is not a time in seconds, 0 or more")


if __name__ == "__main__":
    sys.exit(main())
