"""Run a text service behind a tritonserver, with PyTriton's model between the two, until a signal.

PyTriton's own `Triton` would start a server that listens on ports itself and keeps its token, with
which models are loaded, in the server's arguments. Here the server is the one of `deploy`: on Unix
sockets, behind the gateway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from export_scripts.triton.signature import TensorSignature
from inference.engine.engine import Engine
from inference.gateway.access import OPEN_ACCESS, Access
from inference.gateway.sockets import ServerSockets
from inference.ports import ports_problems
from inference.private_folder import PrivateFolder
from inference.pytriton.signature import MAX_BATCH_SIZE
from inference.pytriton.text_service import TextService
from inference.server.server import ServerStartError, TritonServer
from inference.server.server_log import ForwardedLog

logger = logging.getLogger(__name__)

_WATCH_S = 0.2
_PATIENCE_S = 10.0  # for a server that is too busy to answer
_READY_S = 120.0  # the engine has loaded; what starts is the server and small processes
_DRAIN_S = 25.0  # for requests in flight when the server is asked to stop
_ANSWER_S = 1.0  # for the errors of a failed engine to reach the clients
# PyTriton 0.7.0 gives instances other than the first one second to find it, and may find it before
# it listens: on a busy machine this function of proxy/communication.py fails.
_INSTANCE_RACE = "get_config_from_handshake_server"
# The shared memory that PyTriton moves tensors in needs parts of the standard library that the
# interpreter inside its server may lack; requests of text are small enough without it.
_VARIABLES = {"PYTRITON_NO_TENSORSTORE": "1"}
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
        access: Limits of the clients.
        sockets: Folder for the sockets of the server's owner; None makes one.
    """

    name: str
    host: str = "0.0.0.0"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    instances: int = 8
    merge_requests: bool = False
    access: Access = OPEN_ACCESS
    sockets: Path | None = None

    @property
    def ports(self) -> dict[str, int]:
        """The ports by what they are for."""
        return {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}

    def check(self) -> None:
        """Raise ServingError if a port is unavailable, or the limits of the clients are wrong."""
        problems = ports_problems(self.host, self.ports, keys=_PORT_FLAGS)
        if problems := [*problems, *self.access.problems(prefix="--", joiner="-")]:
            raise ServingError("\n".join(problems))


def serve(endpoint: Endpoint, engine: Engine, service: TextService) -> None:
    """Serve until a KeyboardInterrupt.

    Raises:
        ServingError: The server could not start, or ended; or the engine failed.
    """
    os.environ |= _VARIABLES
    folder = PrivateFolder("pytriton")
    instances = endpoint.instances
    try:
        while not _serve(endpoint, engine, service, folder.path, instances):
            logger.warning("%d instances did not start in time; trying fewer", instances)
            instances //= 2
    finally:
        folder.remove()


def _serve(
    endpoint: Endpoint, engine: Engine, service: TextService, folder: Path, instances: int
) -> bool:
    """Serve with a number of instances; return False if they did not start in time."""
    model, repository = _model(endpoint, service, folder / f"{instances}", instances)
    server = TritonServer(
        repository,
        http_port=endpoint.http_port,
        grpc_port=endpoint.grpc_port,
        metrics_port=endpoint.metrics_port,
        host=endpoint.host,
        log_path=folder / f"{instances}.log",
        env=_VARIABLES,
        port_keys=_PORT_FLAGS,
        access=endpoint.access,
        sockets=None if endpoint.sockets is None else ServerSockets(endpoint.sockets),
    )
    drain_s = 0.0
    with ForwardedLog(server.log_path):
        try:
            server.start(timeout_s=_READY_S)
            model.setup()
            where = f"HTTP on {server.http_url}, gRPC on {server.grpc_url}"
            logger.info("serving %s: %s", endpoint.name, where)
            _watch(server, model, engine)
        except ServerStartError as error:
            if instances > 1 and any(_INSTANCE_RACE in reason for reason in error.reasons):
                return False
            raise ServingError(str(error)) from error
        except KeyboardInterrupt:
            logger.info("stopping")
            drain_s = _DRAIN_S
        finally:
            server.stop(drain_s=drain_s)
            model.clean()
    return True


def _model(
    endpoint: Endpoint, service: TextService, folder: Path, instances: int
) -> tuple[Any, Path]:
    """Return PyTriton's side of the model, and a new repository with the server's side."""
    from pytriton.decorators import TritonContext
    from pytriton.model_config import DynamicBatcher, ModelConfig
    from pytriton.models.model import Model
    from pytriton.utils.workspace import Workspace

    workspace = Workspace(folder)
    # An error of one call is the answer of all its requests, so unless the user wants it otherwise
    # each request is a call of its own; the engine puts their steps together.
    batcher = DynamicBatcher(preferred_batch_size=None if endpoint.merge_requests else [1])
    model = Model(
        model_name=endpoint.name,
        model_version=1,
        inference_fn=[service.infer] * instances,
        inputs=pytriton_tensors(service.inputs),
        outputs=pytriton_tensors(service.outputs),
        config=ModelConfig(max_batch_size=MAX_BATCH_SIZE, batcher=batcher),
        workspace=workspace,
        triton_context=TritonContext(),
        strict=True,
    )
    model.generate_model(workspace.model_store_path)
    return model, workspace.model_store_path


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


def _watch(server: TritonServer, model: Any, engine: Engine) -> None:
    """Block until a failure, and raise it."""
    while True:
        if reason := engine.healthy():
            sleep(_ANSWER_S)
            raise ServingError(f"the engine failed:\n{reason}")
        if reason := server.failure(patience_s=_PATIENCE_S):
            raise ServingError(f"the server failed: {reason}")
        if not model.is_alive():
            raise ServingError("PyTriton's threads have ended; their output is above")
        sleep(_WATCH_S)
