"""Run PyTriton around a text service until a signal or a failure."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from export_scripts.triton.signature import TensorSignature
from inference.engine.engine import Engine
from inference.ports import pick_free_ports, ports_problems
from inference.pytriton.signature import MAX_BATCH_SIZE
from inference.pytriton.text_service import TextService
from inference.server.installation import interpreter_libraries, library_variables
from inference.server.supervisor import descendants

logger = logging.getLogger(__name__)

_WATCH_S = 0.2
_DRAIN_S = 25.0  # for requests in flight when the server is asked to stop
# Until the server ends although clients hold connections; they may be idle, so it is short.
_CLOSE_S = 5
_ANSWER_S = 1.0  # for the errors of a failed engine to reach the clients
# PyTriton 0.7.0 gives instances other than the first one second to find it (proxy/communication.py,
# get_config_from_handshake_server); on a busy machine that is not always enough.
_INSTANCE_RACE = "Timeout occurred while waiting for config file"
_PORT_FLAGS = {"http": "--http-port", "grpc": "--grpc-port", "metrics": "--metrics-port"}


class ServingError(RuntimeError):
    """The server could not start, or ended by itself."""


@dataclass(frozen=True)
class Endpoint:
    """Address and settings of a PyTriton server.

    Attributes:
        name: Of the model.
        host: Address to listen at.
        http_port: 0 takes a free one, as the other two.
        grpc_port: See above.
        metrics_port: See above.
        instances: Requests that are worked on at the same time.
        merge_requests: Whether waiting requests of several clients become one.
    """

    name: str
    host: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    instances: int = 8
    merge_requests: bool = False

    @property
    def ports(self) -> dict[str, int]:
        """The ports by what they are for."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    def check(self) -> None:
        """Raise ServingError if a port is unavailable."""
        if problems := ports_problems(self.host, self.ports, keys=_PORT_FLAGS):
            raise ServingError("\n".join(problems))


def serve(endpoint: Endpoint, engine: Engine, service: TextService) -> None:
    """Serve until a KeyboardInterrupt.

    Raises:
        ServingError: The server could not start, or ended; or the engine failed.
    """
    # The shared memory that PyTriton moves tensors in needs parts of the standard library that the
    # interpreter inside its server may lack; requests of text are small enough without it.
    os.environ.setdefault("PYTRITON_NO_TENSORSTORE", "1")
    with _Scratch() as scratch:
        triton: Any = None
        try:
            own = set(descendants(os.getpid()))
            triton = _start(endpoint, service, scratch.folder)
            scratch.watch_over([pid for pid in descendants(os.getpid()) if pid not in own])
            _watch(triton, engine)
        except KeyboardInterrupt:
            logger.info("stopping")
            _drain(service)
        finally:
            if triton is not None:
                triton.stop()


def _start(endpoint: Endpoint, service: TextService, folder: Path) -> Any:
    from tritonclient.utils import InferenceServerException

    free = pick_free_ports(endpoint.host, len(endpoint.ports))
    ports = {name: port or free.pop() for name, port in endpoint.ports.items()}
    instances = endpoint.instances
    os.environ |= library_variables([interpreter_libraries()])  # PyTriton's server inherits them
    while True:
        triton = _bound(endpoint, ports, service, folder / f"workspace{instances}", instances)
        try:
            triton.run()
        except (InferenceServerException, TimeoutError) as error:
            triton.stop()
            if _INSTANCE_RACE not in str(error) or instances == 1:
                raise ServingError(f"the server did not start: {_last_line(str(error))}") from error
            logger.warning("%d instances did not start in time; trying fewer", instances)
            instances //= 2
        except BaseException:
            triton.stop()
            raise
        else:
            where = ", ".join(f"{name} {port}" for name, port in ports.items())
            logger.info("serving %s on %s: %s", endpoint.name, endpoint.host, where)
            return triton


def _bound(
    endpoint: Endpoint, ports: dict[str, int], service: TextService, workspace: Path, instances: int
) -> Any:
    """Return PyTriton's server with the model, not started."""
    from pytriton.model_config import DynamicBatcher, ModelConfig
    from pytriton.triton import Triton, TritonConfig

    config = TritonConfig(
        **{f"{name}_port": port for name, port in ports.items()},
        **{f"{name}_address": endpoint.host for name in ports},
        exit_timeout_secs=_CLOSE_S,
    )
    triton = Triton(config=config, workspace=workspace)
    # An error of one call is the answer of all its requests, so unless the user wants it otherwise
    # each request is a call of its own; the engine puts their steps together.
    batcher = DynamicBatcher(preferred_batch_size=None if endpoint.merge_requests else [1])
    triton.bind(
        model_name=endpoint.name,
        infer_func=[service.infer] * instances,
        inputs=pytriton_tensors(service.inputs),
        outputs=pytriton_tensors(service.outputs),
        config=ModelConfig(max_batch_size=MAX_BATCH_SIZE, batcher=batcher),
        strict=True,
    )
    return triton


def pytriton_tensors(signatures: Sequence[TensorSignature]) -> list[Any]:
    """Return inputs or outputs as PyTriton declares them."""
    import numpy as np
    from pytriton.model_config import Tensor
    from tritonclient.utils import triton_to_np_dtype

    return [
        Tensor(
            name=each.name,
            dtype=np.bytes_
            if each.dtype == "BYTES"
            else np.dtype(triton_to_np_dtype(each.dtype)).type,
            shape=each.dims,
            optional=each.optional,
        )
        for each in signatures
    ]


def _watch(triton: Any, engine: Engine) -> None:
    """Block until a failure, and raise it."""
    while True:
        if reason := engine.healthy():
            sleep(_ANSWER_S)
            raise ServingError(f"the engine failed:\n{reason}")
        if not triton.is_alive():
            raise ServingError("tritonserver has ended; its output is above")
        sleep(_WATCH_S)


def _drain(service: TextService) -> None:
    """Wait until every request is answered, within reason."""
    deadline = monotonic() + _DRAIN_S
    while service.busy and monotonic() < deadline:
        sleep(_WATCH_S)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip(" ;")), text)


class _Scratch:
    """A folder, and processes, that do not outlive this process even if it is killed.

    A shell waits for the end of its input. It has a session of its own, because launchers kill
    whole groups of processes. tritonserver would take half a minute to notice by itself.
    """

    _SCRIPT = 'read -r pids; read -r ended || kill -9 $pids 2>/dev/null; rm -rf -- "$0"'

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slipway-pytriton-"))
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, str(self.folder)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> _Scratch:
        return self

    def watch_over(self, pids: Sequence[int]) -> None:
        """Have these processes end with this one; to be called once."""
        self._write_line(" ".join(map(str, pids)))

    def __exit__(self, *_: object) -> None:
        """Remove the folder; the processes have ended."""
        self._write_line("\n")  # a shell without pids takes the first line for them
        self._shell.communicate()

    def _write_line(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(line + "\n")
        self._shell.stdin.flush()
