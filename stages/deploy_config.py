"""Configuration of a server, and its checks: engine, repository, ports and times."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass, replace
from pathlib import Path

from export_scripts.ft.layout import ft_directory
from export_scripts.triton.object_store import StoreLocation, parse_location
from inference.gateway.access import OPEN_ACCESS, Access
from inference.openai.options import OpenAIOptions
from inference.ports import port_problem, ports_problems

PORT_KEYS = {
    "http": "deploy.http_port",
    "grpc": "deploy.grpc_port",
    "metrics": "deploy.metrics_port",
    "openai": "deploy.openai.port",
}
PYTORCH, FASTERTRANSFORMER = "pytorch", "fastertransformer"
TRITON, PYTRITON = "triton", "pytriton"
NEMO, NEMO_MODEL = "nemo", "GPT"  # an interface of PyTriton, and what its clients ask for
STORE_SCHEME = "s3://"


@dataclass(frozen=True)
class GemmTuning:
    """Measure NVIDIA's matrix products before the start, for one shape of requests.

    Attributes:
        batch_size, beam_width, input_len: the largest that is expected.
        program_dir: folder of gpt_gemm, t5_gemm and bert_gemm.
    """

    batch_size: int = 8
    beam_width: int = 1
    input_len: int = 128
    program_dir: Path = Path("/opt/FasterTransformer/build/bin")


@dataclass(frozen=True)
class DeployConfig:
    """A model repository, and the server for it.

    Attributes:
        repository: folder of the Triton repository.
        model_name: the model that takes token ids.
        is_from_elsewhere: no stage makes the repository; it has to exist already.
        store: the place in an object store that is served instead of `repository`; None for the
            folder.
        instance_count: engines of the model in the server, each on GPUs or cores of its own.
        data_type: type of computation; only the tuning reads it.
        server: triton, which serves the repository, or pytriton, which serves its weights.
        interface: of pytriton: text, nemo or nemo-deploy.
        host: address that the server listens on.
        http_port, grpc_port, metrics_port: 0 takes a free one.
        ready_timeout_s: the start fails when the models are not ready by then.
        openai: the endpoint of OpenAI's protocol; None for none.
        access: who may send requests, and how large they may be; of the pytorch engine.
        drain_s: time that running requests get to finish when the server stops.
        max_restarts: how often a server that has failed is started again.
        restart_backoff_s: wait before the second restart in a row; doubled for each further one.
        nodes: nodes that share the model.
        is_mpi_step: the scheduler starts the server's process so that MPI finds it.
        visible_devices: CUDA_VISIBLE_DEVICES of the server; None leaves it as it is.
        serves_here: this machine will serve; its ports can be checked beforehand.
        local_gpus: GPUs visible on this machine if it will serve; else None.
        gemm_tuning: of the fastertransformer engine; None for none.
        remarks: to show before the start.
    """

    repository: Path
    model_name: str
    is_from_elsewhere: bool = False
    store: StoreLocation | None = None
    tp_size: int = 1
    pp_size: int = 1
    instance_count: int = 1
    data_type: str = "fp32"
    engine: str = PYTORCH
    server: str = TRITON
    interface: str = "text"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai: OpenAIOptions | None = None
    access: Access = OPEN_ACCESS
    ready_timeout_s: float = 300.0
    drain_s: float = 30.0
    max_restarts: int = 0
    restart_backoff_s: float = 5.0
    nodes: int = 1
    is_mpi_step: bool = False
    visible_devices: str | None = None
    serves_here: bool = False
    local_gpus: int | None = None
    gemm_tuning: GemmTuning | None = None
    remarks: tuple[str, ...] = ()

    @property
    def ports(self) -> dict[str, int]:
        """The ports by their names in PORT_KEYS."""
        found = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        return found if self.openai is None else {**found, "openai": self.openai.port}

    def with_ports(
        self, *, http: int = 0, grpc: int = 0, metrics: int = 0, openai: int = 0
    ) -> DeployConfig:
        """Return the same server on other ports; 0 takes a free one."""
        options = None if self.openai is None else replace(self.openai, port=openai)
        return replace(self, http_port=http, grpc_port=grpc, metrics_port=metrics, openai=options)

    @property
    def weights_dir(self) -> Path:
        """The folder of shards, on this machine's disk."""
        return ft_directory(self.repository / self.model_name / "1", self.tp_size)

    @property
    def source(self) -> str:
        """The repository as tritonserver names it."""
        return self.store.triton_url if self.store is not None else str(self.repository)

    @property
    def may_start_again(self) -> bool:
        """Return whether a server that has failed can be replaced within its job.

        Several processes of NVIDIA's backend meet through MPI, which admits no process later; our
        ranks meet again.
        """
        return self.engine != FASTERTRANSFORMER or self.nodes == 1


def is_store_url(text: str | None) -> bool:
    """Return whether a repository lies in an object store."""
    return text is not None and text.startswith(STORE_SCHEME)


def store_location(repository: str | None, endpoint_url: str | None) -> StoreLocation | None:
    """Return the place of a repository in an object store, None for a folder.

    Raises:
        ValueError: the URL, or that of the endpoint, has another form; it is named by its key.
    """
    if repository is None or not is_store_url(repository):
        if endpoint_url is not None:
            raise ValueError(
                "deploy.endpoint_url is the address of an object store; give deploy.repository="
                "s3://bucket/prefix too, or set deploy.endpoint_url=null."
            )
        return None
    for key, url in (("repository", repository), ("endpoint_url", endpoint_url)):
        if url is not None and "@" in url:
            # Not repeated here: it may be a secret.
            raise ValueError(
                f"deploy.{key} holds a user or a password; leave them out: credentials come from "
                "the environment, ~/.aws or the machine's role."
            )
    try:
        return parse_location(repository, endpoint_url=endpoint_url)
    except ValueError as error:
        raise ValueError(f"deploy.repository: {error}") from error


def check_deploy(config: DeployConfig) -> list[str]:
    """Return the problems of a server's configuration."""
    problems = [*_repository_problems(config), *_port_problems(config)]
    if config.engine == PYTORCH:
        problems += config.access.problems()
    elif config.access != OPEN_ACCESS:
        problems.append(
            "deploy.max_request_mb, deploy.tls_cert, deploy.token_file and "
            "deploy.client_shared_memory have no effect with deploy.engine=fastertransformer, "
            "whose server listens itself; leave them out, and put a proxy in front of it."
        )
    problems += _openai_problems(config)
    if config.server == PYTRITON:
        problems += _pytriton_problems(config)
    world_size = config.tp_size * config.pp_size
    if config.local_gpus is not None and config.local_gpus < world_size:
        problems.append(_too_few_gpus(config, world_size))
    if config.gemm_tuning is not None and config.engine == PYTORCH:
        problems.append(
            "deploy.gemm_tuning.enabled=true measures NVIDIA's kernels; it needs "
            "deploy.engine=fastertransformer."
        )
    return problems


def _pytriton_problems(config: DeployConfig) -> list[str]:
    """Return what PyTriton's server cannot do."""
    found = []
    if config.engine != PYTORCH:
        found.append(f"deploy.engine={config.engine} cannot be served by deploy.server=pytriton.")
    if config.is_from_elsewhere:
        found.append(
            "deploy.repository is served by deploy.server=triton; with pytriton set it to null: "
            "the exported model's weights are served."
        )
    if config.nodes > 1:
        found.append(
            f"deploy.server=pytriton serves on one node, and this model needs {config.nodes}; "
            "submit the batch script of docs/pytriton.md."
        )
    if config.instance_count > 1:
        found.append(
            f"export.triton_deployment.instance_count={config.instance_count} needs "
            "deploy.server=triton; PyTriton serves one."
        )
    if config.openai is not None:
        found.append(
            "deploy.openai.enabled=true needs deploy.server=triton; PyTriton serves no tokens."
        )
    return found


def _too_few_gpus(config: DeployConfig, world_size: int) -> str:
    if config.is_from_elsewhere and config.store is None:
        return (
            f"deploy.repository={config.repository} was made for {config.tp_size} x "
            f"{config.pp_size} = {world_size} GPUs (tensor_para_size x pipeline_para_size), and "
            f"this machine shows {config.local_gpus}; show more with CUDA_VISIBLE_DEVICES, export "
            "it again for fewer, or add the parameter device=cpu to its config.pbtxt."
        )
    return (
        f"export.model.tensor_model_parallel_size={config.tp_size} x "
        f"export.triton_deployment.pipeline_model_parallel_size={config.pp_size} need "
        f"{world_size} GPUs, and this machine shows {config.local_gpus}; lower the sizes, show "
        "more with CUDA_VISIBLE_DEVICES, or set export.triton_deployment.parameters.device=cpu."
    )


def _repository_problems(config: DeployConfig) -> list[str]:
    is_made_here = config.store is not None or not config.is_from_elsewhere
    if is_made_here or any(config.repository.glob("*/config.pbtxt")):
        return []
    return [
        f"deploy.repository={config.repository} holds no model (<name>/config.pbtxt); give the "
        "folder above the models of a Triton repository, or null for the exported one."
    ]


def _openai_problems(config: DeployConfig) -> list[str]:
    if config.openai is None:
        return []
    found = []
    if config.engine == FASTERTRANSFORMER:
        found.append(
            "deploy.openai.enabled=true needs deploy.engine=pytorch; the ports of NVIDIA's backend "
            "are its own server's."
        )
    folder = config.openai.tokenizer
    if folder is not None and not folder.is_dir():
        found.append(f"deploy.openai.tokenizer={folder} is not a folder.")
    if folder is None and config.store is not None:
        found.append(
            "deploy.openai.enabled=true with a repository in an object store needs "
            "deploy.openai.tokenizer, a folder with the tokenizer's files on this machine."
        )
    return found


def _may_be_host(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    is_name = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?", text)
    return is_name is not None and re.fullmatch(r"[0-9.]+", text) is None


def _port_problems(config: DeployConfig) -> list[str]:
    names = config.ports
    ports = {PORT_KEYS[name]: port for name, port in names.items()}
    problems = [
        f"{key}={port} is not a port; use 1 to 65535, or 0 for any free one."
        for key, port in ports.items()
        if not 0 <= port <= 65535
    ]
    if problems:
        return problems
    chosen = [port for port in ports.values() if port]
    if len(set(chosen)) < len(chosen):
        given = ", ".join(f"{key}={port}" for key, port in ports.items())
        return [f"{given}: the ports must differ; 0 takes any free one."]
    if not _may_be_host(config.host):
        return [f"deploy.host={config.host} is neither an address nor the name of a host."]
    if not config.serves_here:
        return []
    if (problem := port_problem(config.host, 0)) is not None:
        return [
            f"deploy.host={config.host}: ports {problem}; give an address of this machine, such as "
            "127.0.0.1, or 0.0.0.0 for all."
        ]
    return ports_problems(config.host, names, keys=PORT_KEYS)
