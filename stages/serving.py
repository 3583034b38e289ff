"""One start of a server of the configured engine, and its address once it is ready."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from export_scripts.ft.identity import checkpoint_hash
from export_scripts.triton.repository import ENSEMBLE, TEXT_MODELS
from foundations.files.json_content import Fields
from inference.server.installation import mpi_start
from inference.server.kinds import TRITONSERVER
from inference.server.log import rotated_log
from inference.server.openai_server import OpenAIServer
from inference.server.server import ModelServer
from inference.system.parent_process import LinkedProcess
from inference.system.supervision import RESTARTS_VARIABLE
from stages.base import StageError
from stages.deploy_config import (
    FASTERTRANSFORMER,
    NEMO,
    PORT_KEYS,
    PYTRITON,
    VLLM,
    DeployConfig,
)
from stages.endpoint import ServerEndpoint, server_log
from stages.engines import TOKEN_VARIABLE
from stages.job_process import job_id_here, node_address
from stages.progress import Progress
from stages.record import now
from stages.server_starts import ServerStart, announce_start

AnyServer: TypeAlias = ModelServer | OpenAIServer


@contextmanager
def serving(
    config: DeployConfig,
    folder: Path,
    progress: Progress,
    *,
    restarts: int = 0,
    standby: LinkedProcess | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[AnyServer, ServerEndpoint]]:
    """Run a server for the duration of the block; yield it, once ready, with its address.

    A ready server has answered a small request. Its log is `server-<job id>.log` in `folder`; logs
    of earlier starts get a number. `standby` is a process that an earlier server of this project
    prepared. `check` is called until the server is ready; an exception that it raises ends the
    start.

    Raises:
        ServerStartError: the server did not become ready, or did not answer.
        StageError: the server does not serve the configured model.
    """
    job_id = job_id_here()
    log_path = server_log(folder, job_id)
    rotated_log(log_path)
    start = announce_start(folder, job_id, restarts + 1) if config.nodes > 1 else None
    options = {
        "host": config.host,
        "ports": config.ports,
        "log_path": log_path,
        "env": {**server_environment(config), RESTARTS_VARIABLE: str(restarts)},
        "port_keys": PORT_KEYS,
        "access": config.access,
    }
    if standby is not None:
        options["standby"] = standby
    make = _other_engine if config.is_other_engine else _server
    with make(config, folder, start, options) as server:
        progress.update("starting the server")
        server.start(timeout_s=config.ready_timeout_s, progress=progress.update, check=check)
        yield server, endpoint_of(config, server, restarts)


def server_environment(config: DeployConfig) -> dict[str, str]:
    """Return the environment variables that a server of this configuration needs."""
    environment = {}
    if config.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = config.visible_devices
    if config.engine == FASTERTRANSFORMER:
        environment |= mpi_start(is_step=config.is_mpi_step)[1]
    return environment


def server_prefix(config: DeployConfig) -> Sequence[str]:
    """Return the command prefix of the server: mpirun for NVIDIA's backend outside an MPI step."""
    return mpi_start(is_step=config.is_mpi_step)[0] if config.engine == FASTERTRANSFORMER else ()


def _other_engine(
    config: DeployConfig, _: Path, start: ServerStart | None, options: Fields
) -> AnyServer:
    if config.engine == VLLM and (tokens := config.access.tokens()):
        options["env"][TOKEN_VARIABLE] = tokens[0]
    command = config.command_line
    if start is not None:
        command = start.fill_command(command)
    return OpenAIServer(command, model=config.model_name, folder=config.folder, **options)


def _server(
    config: DeployConfig, folder: Path, start: ServerStart | None, options: Fields
) -> AnyServer:
    if start is not None:
        options["env"] |= start.variables(folder)
    source = config.source
    if config.server == PYTRITON:
        from inference.pytriton.repository import NEMO_NAME, write_text_repository

        repository = folder / "pytriton"
        shutil.rmtree(repository, ignore_errors=True)
        write_text_repository(
            repository,
            config.weights_dir,
            name=NEMO_NAME if config.interface == NEMO else config.model_name,
            interface=config.interface,
            tp_size=config.tp_size,
            pp_size=config.pp_size,
        )
        source = str(repository)
    return ModelServer(
        source,
        openai=config.openai if config.openai.enabled else None,
        has_triton=config.hosts == TRITONSERVER,
        has_nvidia_backend=config.engine == FASTERTRANSFORMER,
        prefix=server_prefix(config),
        **options,
    )


def endpoint_of(config: DeployConfig, server: AnyServer, restarts: int) -> ServerEndpoint:
    """Return the address of a server; another engine has a single port.

    Raises:
        StageError: the server does not serve the configured model.
    """
    listens_to_all, ports = server.connect_host != server.host, server.ports
    model = config.model_name if config.is_other_engine else _model_name(config, server)
    return ServerEndpoint(
        host=(node_address() if listens_to_all else None) or server.connect_host,
        http=ports["http"],
        grpc=ports.get("grpc", 0),
        metrics=ports.get("metrics", ports["http"]),
        model=model,
        ensemble=ENSEMBLE if ENSEMBLE in server.models else None,
        job_id=job_id_here(),
        tp=config.tp_size,
        pp=config.pp_size,
        ready_at=now(),
        nodes=config.nodes,
        restarts=restarts,
        uses_tls=config.access.tls_cert is not None,
        openai=ports["http"] if config.is_other_engine else ports.get("openai"),
        served=_served_by(config, server, model) if isinstance(server, ModelServer) else {},
    )


def _served_by(config: DeployConfig, server: ModelServer, model: str) -> dict[str, str]:
    """Return the identity of the served weights, empty for another project's model."""
    found = server.identity(model)
    if found and not found["checkpoint"]:  # the server may load from an object store
        found["checkpoint"] = checkpoint_hash(config.weights_dir)
    return found


def _model_name(config: DeployConfig, server: AnyServer) -> str:
    """Return the name of the served model for token ids: the configured or the only one."""
    if config.model_name in server.models:
        return config.model_name
    others = [name for name in server.models if name not in TEXT_MODELS]
    if len(others) != 1:
        raise StageError(
            f"{config.source} serves {', '.join(server.models)}, but not {config.model_name}; "
            "the last part of export.triton_deployment.triton_model_dir names the model."
        )
    return others[0]
