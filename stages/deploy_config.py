"""The section `deploy` of the configuration, the server that it describes, and their checks."""

# ruff: noqa: RUF009 - `option` returns a dataclass field

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from export_scripts.ft.layout import ft_directory
from export_scripts.triton.object_store import StoreLocation, parse_location
from foundations.files.json_content import Fields
from foundations.job_options import JobOptions
from foundations.time_limit import minutes
from foundations.values import (
    INT32,
    PORT,
    SECONDS,
    option,
)
from inference.front.access import Access, OpenAIOptions, access_of
from inference.server.installation import find_triton
from inference.server.kinds import AUTO, SERVERS, TRITONSERVER, chosen_server
from inference.server.openai_server import HOST_FIELD, MODEL_FIELD, PORT_FIELD
from inference.system.ports import DEFAULT_PORTS, ports_problems
from stages.engines import (
    OWN_VLLM_OPTIONS,
    VLLM_TYPES,
    adapter_options,
    several_nodes,
    vllm_command,
)

PORT_KEYS = {
    "host": "deploy.host",
    "http": "deploy.http_port",
    "grpc": "deploy.grpc_port",
    "metrics": "deploy.metrics_port",
    "openai": "deploy.openai.port",
}
PYTORCH, FASTERTRANSFORMER = "pytorch", "fastertransformer"
VLLM, OPENAI = "vllm", "openai"  # other engines; they serve Hugging Face folders
PYTRITON = "pytriton"
DEFAULT_SERVER = AUTO
NEMO = "nemo"  # an interface of PyTriton


@dataclass(frozen=True)
class DeploySection(JobOptions, Access):
    """`deploy`: the server. Defaults that refer to other keys are in conf/deploy/default.yaml."""

    time_limit: Any = option("the server is stopped after this time", "1-00:00:00", check=minutes)
    uptime: Any = option(
        "serve for this long, in a chain of jobs (cluster=bcm) of time_limit each; null: one job",
        None,
        check=minutes,
    )
    handover_s: float | None = option(
        "the next job of the chain may start this many seconds before a job must end; null: a "
        "quarter of its time",
        None,
        within=(1, SECONDS),
    )
    engine: str = option(
        "runtime of the model: pytorch (Slipway's engine), fastertransformer (NVIDIA's backend), "
        "vllm (vllm serve), or openai (deploy.command); the last two serve Hugging Face folders",
        PYTORCH,
        choices=(PYTORCH, FASTERTRANSFORMER, VLLM, OPENAI),
    )
    executable: str = option("program of deploy.engine=vllm, such as /venvs/vllm/bin/vllm", "vllm")
    vllm: Fields = option("options of vllm serve, under vLLM's names", {})
    command: list[str] = option(
        "command line of deploy.engine=openai; {host}, {port} and {model} are filled in", []
    )
    server: str = option(
        "slipway (this project's own server), tritonserver (in TRITON_SERVER, on PATH, or of "
        "nvidia-pytriton), auto (tritonserver if one is in TRITON_SERVER or on PATH, else "
        "slipway), or pytriton (PyTriton's interface: text in, text out)",
        DEFAULT_SERVER,
        choices=(*SERVERS, PYTRITON),
    )
    interface: str = option(
        "tensors of pytriton's model: text, nemo (PyTriton's NeMo example) or nemo-deploy (NeMo's "
        "NemoQueryLLM)",
        "text",
        choices=("text", NEMO, "nemo-deploy"),
    )
    repository: str | None = option(
        "serve this repository (or Hugging Face folder) instead of the exported one; with "
        "s3://bucket/prefix, or s3://http://host:port/bucket/prefix for another store, export "
        "publishes to the store and the server loads from it",
        None,
        is_path=True,
    )
    container: str | None = option("image of the server; null: the one of `container`", None)
    host: str = option("address to listen on; 0.0.0.0 for every interface", "127.0.0.1")
    http_port: int = option(
        "port of HTTP requests; 0 takes a free one", DEFAULT_PORTS["http"], within=(0, PORT)
    )
    grpc_port: int = option(
        "port of gRPC requests; 0 takes a free one", DEFAULT_PORTS["grpc"], within=(0, PORT)
    )
    metrics_port: int = option(
        "port of the Prometheus metrics; 0 takes a free one",
        DEFAULT_PORTS["metrics"],
        within=(0, PORT),
    )
    openai: OpenAIOptions = field(default_factory=OpenAIOptions)
    ready_timeout_s: float = option(
        "seconds until every model must be ready", 300.0, within=(1, SECONDS)
    )
    drain_s: float = option(
        "seconds that running requests have to finish when the server stops",
        30.0,
        within=(0, SECONDS),
    )
    max_restarts: int = option("maximum number of restarts after failures", 3, within=(0, INT32))
    restart_backoff_s: float = option(
        "seconds before the second restart in a row, doubled for each further one",
        5.0,
        within=(0, SECONDS),
    )
    keep: bool = option("keep serving after the evaluation, until Ctrl-C or the time limit", False)

    @property
    def store(self) -> StoreLocation | None:
        """The served location in an object store; None for a folder. Raises ValueError."""
        if not is_store_url(self.repository):
            return None
        try:
            return parse_location(str(self.repository))
        except ValueError as error:
            raise ValueError(f"deploy.repository: {error}") from error


@dataclass(frozen=True, kw_only=True)
class DeployConfig(DeploySection):
    """The section `deploy`, with settings derived from the rest of the configuration.

    Attributes:
        folder: the Triton repository, or the Hugging Face folder of another engine.
        adapter: folder of an adapter that vLLM serves as `model_name`; the model in `folder` is
            then served as `base_name`.
        model_name: name of the model that takes token ids.
        instance_count: engines of the model in the server, each with its own GPUs or cores.
        data_type: type of computation, for vLLM.
        gpus_per_node: GPUs that the job requests; None if the cluster has no GPU resource.
        max_seq_len: maximum tokens of a sequence, for vLLM; None for the model's own.
        uptime_s: how long a chain of jobs serves; None for a single job.
        nodes: number of nodes that share the model.
        is_mpi_step: whether the scheduler starts the server's processes with MPI.
        visible_devices: CUDA_VISIBLE_DEVICES of the server; None leaves it as it is.
        serves_here: whether this machine will serve, so that its ports can be checked.
        local_gpus: number of visible GPUs if this machine will serve; None if not.
        remarks: notes to show before the start.
        is_remote: whether only other machines can see the folder.
    """

    folder: Path
    model_name: str
    adapter: Path | None = None
    gpus_per_node: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    instance_count: int = 1
    data_type: str = "fp32"
    max_seq_len: int | None = None
    uptime_s: float | None = None
    nodes: int = 1
    is_mpi_step: bool = False
    visible_devices: str | None = None
    serves_here: bool = False
    local_gpus: int | None = None
    remarks: Sequence[str] = ()
    is_remote: bool = False

    @property
    def serves_existing(self) -> bool:
        """Whether an existing repository is served, which no stage makes."""
        return self.repository is not None

    @property
    def tasks_per_node(self) -> int:
        """Tasks per node: on several nodes one for each of our ranks, or one server."""
        is_spread = self.nodes > 1 and self.engine == PYTORCH
        return self.tp_size * self.pp_size // self.nodes if is_spread else 1

    @property
    def access(self) -> Access:
        """Limits and credentials of clients."""
        return access_of(vars(self))

    @property
    def hosts(self) -> str:
        """The program that serves the repository: slipway or tritonserver."""
        if self.engine == FASTERTRANSFORMER:
            return TRITONSERVER
        wanted = AUTO if self.server == PYTRITON else self.server
        return chosen_server(wanted, needs_triton=self.store is not None)

    @property
    def is_other_engine(self) -> bool:
        """Whether the server is another engine's."""
        return self.engine in (VLLM, OPENAI)

    @property
    def base_name(self) -> str:
        """Name of the model without its adapter."""
        return f"{self.model_name}-base"

    @property
    def command_line(self) -> list[str]:
        """The command of another engine's server; host, port and model are still fields."""
        return self.command_on(0)

    def command_on(self, rank: int) -> list[str]:
        """Return that command for the node number `rank`."""
        if self.engine != VLLM:
            return self.command
        options = {
            "served_model_name": self.base_name if self.adapter else self.model_name,
            "tensor_parallel_size": self.tp_size,
            "pipeline_parallel_size": self.pp_size,
            "max_model_len": self.max_seq_len,
            # With its default 0, vLLM 0.32 aborts running requests at SIGTERM.
            "shutdown_timeout": math.ceil(self.drain_s),
        }
        if rank == 0:  # only the first node listens
            options |= {
                "host": HOST_FIELD,
                "port": PORT_FIELD,
                "ssl_certfile": self.tls_cert,
                "ssl_keyfile": self.tls_key,
            }
        if not self.serves_existing:  # an existing folder states its own type and quantization
            options["dtype"] = VLLM_TYPES[self.data_type]
        if self.nodes > 1:
            options |= several_nodes(self.nodes, rank)
        if self.adapter:
            options |= adapter_options(self.model_name, self.adapter)
        options |= {key.replace("-", "_"): value for key, value in self.vllm.items()}
        return vllm_command(self.executable, options)

    def filled_command(self, folder: str, *, port: int) -> list[str]:
        """Return the command of another engine on one node, with folder and port filled in."""
        values = {MODEL_FIELD: folder, HOST_FIELD: self.host, PORT_FIELD: str(port)}
        return [values.get(word, word) for word in self.command_line]

    @property
    def ports(self) -> dict[str, int]:
        """The ports, by their names in PORT_KEYS."""
        if self.is_other_engine:
            return {"http": self.http_port}
        found = {"http": self.http_port, "grpc": self.grpc_port, "metrics": self.metrics_port}
        return {**found, "openai": self.openai.port} if self.openai.enabled else found

    def with_ports(
        self, *, http: int = 0, grpc: int = 0, metrics: int = 0, openai: int = 0
    ) -> DeployConfig:
        """Return the same server on other ports; 0 takes a free one."""
        options = replace(self.openai, port=openai)
        return replace(self, http_port=http, grpc_port=grpc, metrics_port=metrics, openai=options)

    @property
    def weights_dir(self) -> Path:
        """The folder of shards, if the repository is on this machine's disk."""
        return ft_directory(self.folder / self.model_name / "1", self.tp_size)

    @property
    def source(self) -> str:
        """The repository as tritonserver expects it: a path or a URL."""
        return self.store.triton_url if self.store is not None else str(self.folder)

    @property
    def may_start_again(self) -> bool:
        """Whether a failed server can be restarted within its job.

        Several processes of NVIDIA's backend are connected by MPI, which no process can join later;
        our ranks can meet again.
        """
        return self.engine != FASTERTRANSFORMER or self.nodes == 1


def is_store_url(text: str | None) -> bool:
    """Return whether a repository is in an object store."""
    return text is not None and text.startswith("s3://")


def problems_of_exchange(config: DeployConfig) -> list[str]:
    """Return why a running server cannot exchange its weights."""
    remedy = "use deploy.server=slipway on one node, or watch.exchange=false"
    found = {
        f"deploy.engine={config.engine}": config.engine != PYTORCH,
        f"deploy.server={config.server}": config.engine == PYTORCH and config.server == PYTRITON,
        f"deploy.server={TRITONSERVER}": config.hosts == TRITONSERVER,
        "deploy.repository=s3://...": config.store is not None,
        f"a model over {config.nodes} nodes": config.nodes > 1,
    }
    return [
        f"{setting}: only this project's own server can exchange weights; {remedy}."
        for setting, is_set in found.items()
        if is_set
    ]


def check_deploy(config: DeployConfig) -> Iterator[str]:
    """Yield the problems of a server's configuration."""
    yield from ports_problems(config.host, config.ports, keys=PORT_KEYS, is_here=config.serves_here)
    if config.nodes > 1 and (config.engine == OPENAI or config.server == PYTRITON):
        yield (
            f"a model over {config.nodes} nodes: deploy.engine={config.engine} with deploy.server="
            f"{config.server} serves on one; lower the parallel sizes, or choose another server."
        )
    yield from config.access.problems()
    if config.is_other_engine:
        yield from _other_engine_problems(config)
        return
    if config.serves_here and config.hosts == TRITONSERVER:
        try:
            find_triton()
        except FileNotFoundError as error:
            yield f"deploy needs a tritonserver: {error}"
    is_made_here = config.store is not None or not config.serves_existing
    if not is_made_here and not any(config.folder.glob("*/config.pbtxt")):
        yield (
            f"deploy.repository={config.folder} holds no model (<name>/config.pbtxt); give the "
            "folder above the models of a Triton repository, or null for the exported one."
        )
    if config.openai.enabled:
        yield from config.openai.problems()
    world_size = config.tp_size * config.pp_size
    if config.local_gpus is not None and config.local_gpus < world_size:
        yield _too_few_gpus(config, world_size)


def _other_engine_problems(config: DeployConfig) -> Iterator[str]:
    """Yield the problems of a server of another engine."""
    if config.engine == VLLM:
        given = {key.replace("-", "_") for key in config.vllm}
        of_adapter = dict.fromkeys(("enable_lora", "lora_modules"), "convert.format=peft")
        for key, own in (OWN_VLLM_OPTIONS | (of_adapter if config.adapter else {})).items():
            if key in given:
                yield f"deploy.vllm.{key} is decided by {own}; set that key."
        if not config.access.problems() and len(config.access.tokens() or ()) > 1:
            yield (
                f"deploy.token_file={config.token_file} holds several tokens, and vLLM takes one; "
                "keep one, or check the others in a reverse proxy."
            )
    is_here = config.serves_existing and not config.is_remote
    if is_here and not (config.folder / "config.json").is_file():
        yield (
            f"deploy.engine={config.engine} serves a Hugging Face folder, and "
            f"{config.source} has no config.json; give such a folder in deploy.repository."
        )
    if not any(PORT_FIELD in word for word in config.command_line):
        yield (
            "deploy.command of deploy.engine=openai is the server's command line, with {port} (and "
            "{host}, {model}) where it takes them, such as "
            "[transformers,serve,'{model}',--port,'{port}']."
        )
    elif config.serves_here and shutil.which(config.command_line[0]) is None:
        yield (
            f"{config.command_line[0]} is not a program on this machine; install it, or give its "
            f"path in deploy.{'executable' if config.engine == VLLM else 'command'}."
        )


def _too_few_gpus(config: DeployConfig, world_size: int) -> str:
    if config.serves_existing and config.store is None:
        return (
            f"deploy.repository={config.folder} was made for {config.tp_size} x "
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
