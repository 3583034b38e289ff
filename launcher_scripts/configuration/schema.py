"""The schema of the configuration, as dataclasses: every key, its type and its meaning.

Defaults that refer to other keys, and those of the NeMo launcher's files, are in conf/; all other
defaults are here. `--help` prints the texts, and error messages quote them.
"""

# ruff: noqa: RUF009 - `option` returns a dataclass field

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

from export_scripts.conversion.request import OUTPUT_FORMATS, PEFT, ConversionOptions
from foundations.files.json_content import Fields
from foundations.job_options import JobOptions
from foundations.values import (
    INT32,
    NODE_CPUS,
    NODE_GPUS,
    SECONDS,
    TOKENS,
    Key,
    Within,
    keys_of,
    option,
)
from inference.certify.options import CertifySection
from inference.evaluation.options import EvaluateSection
from launcher_scripts.configuration.settings import DEBUG, is_set
from stages.deploy_config import DeploySection

CLUSTERS = ("local", "bcm", "bcp", "kubernetes")
CLUSTER_ALIASES = {"interactive": "local", "slurm": "bcm", "k8s": "kubernetes"}
# Names of the NeMo launcher for the same stages.
_STAGE_ALIASES = {"conversion": "convert", "evaluation": "evaluate"}
DATA_TYPES = ("fp32", "fp16", "bf16")
_RANKS = 4096  # a larger number can only be a typing error
# Patterns of values, each with its error message. Mounts have pyxis' form SOURCE[:TARGET[:FLAGS]],
# dependencies and memory those of sbatch; some sites require account:project in job names.
_MOUNT = (
    r"/[^:,]*(:/[^:,]*(:[\w=+-]+)?)?",
    "not a mount; write /path, /path:/path/in/the/container, or with flags "
    "/path:/path/in/the/container:ro",
)
_PREFIX = (
    r"[\w.:@+-]{0,64}",
    "is part of file names; use at most 64 letters, digits and . _ - : @ +",
)
_SCRIPTS = (
    ".*/launcher_scripts",
    "does not end in /launcher_scripts; give that folder of your checkout",
)
_MEMORY = (
    r"\d{1,5}(\.\d+)?|\d{1,9}[KMGTkmgt][Bb]?",
    "write a number of GB, such as 64, or one with a unit, such as 500M",
)
_INSIDE = (
    r"(?!/|(.*/)?\.\.(/|$)).*",
    "leads out of the claim; give a folder relative to its root, such as gpt/model_repo",
)
_AFTER = r"(singleton|\d+|(after|expand)\w*(:\d+(_\d+|_\*)?(\+\d+)?)+)"
_DEPENDENCY = (
    rf"{_AFTER}([,?]{_AFTER})*",
    "not a dependency of Slurm; write singleton, or for example afterok:1234",
)


@dataclass
class KubernetesSection:
    """`cluster.kubernetes`: further settings of the server's manifests."""

    replicas: int = option("number of servers, each a pod or a group of pods", 1, within=(1, 1024))
    strategy: str = option(
        "how a new server takes over", "Recreate", choices=("Recreate", "RollingUpdate")
    )
    claim: str | None = option("PersistentVolumeClaim that holds the repository", None)
    claim_path: str | None = option("folder of the repository in the claim", None, form=_INSIDE)
    token_secret: str | None = option("Secret whose key `tokens` holds accepted tokens", None)
    tls_secret: str | None = option("Secret of type kubernetes.io/tls", None)
    s3_secret: str | None = option("Secret with the variables of an object store", None)
    pod_monitor: bool = option("add a PodMonitor for the Prometheus operator", False)
    pull_secret: str | None = option("Secret for the registry of the image", None)
    node_selector: dict[str, str] = option("labels that a node must have", {})


@dataclass
class ClusterSection:
    """`cluster`: scheduler options of every job (conf/cluster/<name>.yaml)."""

    partition: str | None = option("partition to submit to", None)
    account: str | None = option("account to charge", None)
    qos: str | None = option("quality of service", None)
    reservation: str | None = option("reservation to use", None)
    constraint: str | None = option("node features that are required", None)
    nodelist: str | None = option("nodes that must be used", None)
    exclude: str | None = option("nodes that must not be used", None)
    gres: str | None = option("generic resources, as sbatch takes them", None)
    comment: str | None = option("comment on each job", None)
    dependency: str | None = option("additional dependency of every job", None, form=_DEPENDENCY)
    exclusive: bool | None = option("take whole nodes", None)
    overcommit: bool | None = option("more than one task per processor", None)
    gpus_per_node: int | None = option(
        "GPUs of one node; null: the cluster has no GPU resource", within=(1, 64)
    )
    gpus_per_task: int | None = option("GPUs bound to each task", None, within=(1, 64))
    mem: int | float | str | None = option(
        "memory per node: 0 is all of it, other numbers are GB", None, form=_MEMORY
    )
    job_name_prefix: str = option("prefix of every job's name", form=_PREFIX)
    srun_args: list[str] = option("appended to every srun", [])
    mpi: str | None = option("MPI flavour of multi-node steps", "pmix")
    setup: list[str] = option("shell lines that run before the job", [])
    additional_parameters: Fields = option("further sbatch options by name", {})
    container_python: str = option("interpreter inside the container", "python3")
    signal_delay_s: int = option(
        "seconds of warning before the time limit", 120, within=(1, 24 * 3600)
    )
    bcprun_args: list[str] = option("appended to every bcprun, ahead of its --cmd", [])
    kubernetes: KubernetesSection = field(default_factory=KubernetesSection)


@dataclass(frozen=True)
class RunSection(JobOptions):
    """`export.run`: names, folders and resources of the exported model."""

    model_train_name: str = option("name of the trained model", is_name=True)
    dependency: str | None = option(
        "dependency of the first job, such as singleton", None, form=_DEPENDENCY
    )
    training_dir: Path | None = option("folder of the training run", None, is_path=True)
    config_summary: str = option("distinguishes exports of one model in folder names", is_name=True)
    results_dir: Path = option("folder of this export: logs, repository and report", is_path=True)
    model_type: str = option("kind of checkpoint: gpt3, t5, mt5, ...")
    gpus_per_node: int | None = option(
        "GPUs for convert and export, which need none", None, within=(1, NODE_GPUS)
    )


@dataclass
class ModelSection:
    """`export.model`: the checkpoint and how its weights are divided."""

    checkpoint_path: Path = option(
        "a .nemo file, an unpacked one, a folder of checkpoints, or the id of a cached model of "
        "the Hugging Face hub",
        is_path=True,
    )
    checkpoint_name: str | None = option(
        "name or pattern of the checkpoint, if that folder has several; null: the last",
        None,
    )
    tensor_model_parallel_size: int = option(
        "GPUs that share each layer when serving; must divide the heads", within=(1, _RANKS)
    )
    weight_data_type: str = option("stored type of the weights", choices=DATA_TYPES)
    processes: int = option("processes that convert in parallel", within=(1, NODE_CPUS))
    load_checkpoints_to_cpu: bool = option("accepted; checkpoints are read on the CPU", False)


@dataclass
class TritonDeploymentSection:
    """`export.triton_deployment`: contents of the Triton repository."""

    triton_model_dir: Path = option(
        "folder of the served model; its parent is the Triton repository", is_path=True
    )
    max_batch_size: int = option("largest batch that the server accepts", within=(1, INT32))
    pipeline_model_parallel_size: int = option(
        "groups of layers when serving; must divide the layers", within=(1, _RANKS)
    )
    int8_mode: Any = option("weight-only int8", choices=(False, True, 0, 1, 2))
    enable_custom_all_reduce: Any = option("NVIDIA's all-reduce", choices=(False, True, 0, 1))
    data_type: str = option("type in which the server computes", choices=DATA_TYPES)
    decoupled: bool = option("stream tokens: several responses for one request", False)
    ensemble: bool = option(
        "add preprocessing, postprocessing and the ensemble: text in and out", True
    )
    portable: bool = option("write no absolute path into the repository", True)
    interactive: bool = option(
        "keep conversations between requests (needs max_batch_size=1)", False
    )
    answer_only: bool = option("the ensemble answers without repeating the prompt", False)
    max_queue_delay_us: int | None = option(
        "longest wait of Triton's dynamic batcher; null: no dynamic batcher",
        None,
        within=(0, 60_000_000),
    )
    instance_count: int = option(
        "engines of the model in one server, each with its own GPUs or cores", 1, within=(1, 1024)
    )
    model_type: str | None = option("model type to serve the weights as, such as T5-Encoder", None)
    parameters: Fields = option("further parameters of the model's config.pbtxt", {})


@dataclass
class BenchmarkSection:
    """`export.benchmark`: how long to wait for the server; `evaluate.latency` does the rest."""

    input_len: int = option("see evaluate.latency.shapes", 60, within=(1, TOKENS))
    output_len: int = option("see evaluate.latency.shapes", 20, within=(1, TOKENS))
    batch_sizes: list[Annotated[int, Within(1, INT32)]] = option(
        "see evaluate.latency.batch_sizes", [1, 2, 4, 8, 16, 32, 64, 128, 256]
    )
    triton_wait_time_s: float = option("seconds to wait for the server", 300, within=(1, SECONDS))
    vocab_size: int = option("accepted; prompts are real text", 51200, within=(1, INT32))


@dataclass
class AccuracySection:
    """`export.accuracy`: measure the exported model as part of the export."""

    enabled: bool = option("run evaluate after export", False)
    test_data: Path | None = option("passages to evaluate with, JSON Lines", None, is_path=True)


@dataclass
class ExportSection:
    """`export`: the model to serve (conf/export/<family>/<name>.yaml)."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    triton_deployment: TritonDeploymentSection = field(default_factory=TritonDeploymentSection)
    benchmark: BenchmarkSection = field(default_factory=BenchmarkSection)
    accuracy: AccuracySection = field(default_factory=AccuracySection)


@dataclass(frozen=True, kw_only=True)
class ConvertSection(ConversionOptions):
    """`convert`: options of the conversion beyond those of `export.model`."""

    format: str = option(
        "fastertransformer: shards to export and serve; huggingface: a folder for other engines; "
        "peft: the adapter of convert.lora_checkpoints apart from its model, for these",
        OUTPUT_FORMATS[0],
        choices=OUTPUT_FORMATS,
    )
    given: Fields = option("config.ini values that the checkpoint does not record", {})

    @property
    def is_adapter(self) -> bool:
        """Whether `convert` writes an adapter without its model."""
        return self.format == PEFT


@dataclass
class WatchSection:
    """`watch`: how action=watch follows the training run `export.run.training_dir`."""

    output_dir: Path = option("folder of its state, its page and the results by step", is_path=True)
    metric: str | None = option(
        "figure that decides which checkpoint is best; null: the first in which two differ, among "
        "those that evaluate.gate bounds, then perplexities, then the rest",
        None,
    )
    parallel: int = option("number of concurrent pipelines", 1, within=(1, 1024))
    order: str = option(
        "which checkpoint is first: the oldest, the newest, or (spread) the newest and then always "
        "the one farthest from those evaluated, which refines the curve step by step",
        "oldest",
        choices=("oldest", "newest", "spread"),
    )
    exchange: bool = option(
        "share one server per concurrent pipeline, into which the weights of one checkpoint after "
        "the other are loaded, instead of starting a server for each checkpoint",
        False,
    )
    keep: int = option("best checkpoints whose repositories are kept", 1, within=(0, INT32))
    retries: int = option("further attempts after a failed pipeline", 2, within=(0, 1000))
    poll_s: float = option("seconds between scans for checkpoints", 30.0, within=(0.01, SECONDS))
    settle_s: float = option(
        "seconds for which a checkpoint's files must not change", 60.0, within=(0, SECONDS)
    )
    patience_s: float = option(
        "seconds after which an incomplete checkpoint that does not change is skipped",
        3600.0,
        within=(0, SECONDS),
    )
    until_step: int | None = option(
        "end once this step is done; null: continue", None, within=(0, (1 << 63) - 1)
    )
    idle_s: float | None = option(
        "end after so many seconds without a new checkpoint; null: continue",
        None,
        within=(0, SECONDS),
    )


@dataclass
class UpgradeSection:
    """`upgrade`: what action=upgrade compares (conf/upgrade/default.yaml)."""

    rows: Fields = option(
        "keys of each row by row name, added to the command line; the first row serves today",
        {},
    )
    gate: Fields = option(
        "bounds of each row against the first, as in evaluate.gate; {}: no drop of more than 1 "
        "point of each share, and 1 % of each perplexity, at 95 %",
        {},
    )
    output_dir: Path = option("folder of the rows' results, and of the page", is_path=True)


@dataclass
class Config:
    """The whole configuration."""

    __pydantic_config__ = {  # noqa: RUF012 - pydantic reads it
        "extra": "forbid",
        "coerce_numbers_to_str": True,
        "allow_inf_nan": False,
    }

    stages: list[str] = option("what to run: convert, certify, export, deploy, evaluate")
    cluster_type: str = option("where to run", choices=CLUSTERS)
    launcher_scripts_path: Path = option(
        "the folder launcher_scripts of a checkout", is_path=True, form=_SCRIPTS
    )
    data_dir: Path = option("folder of data sets", is_path=True)
    base_results_dir: Path = option("folder of all results", is_path=True)
    dry_run: bool = option("write and print every job's script and configuration; start nothing")
    overwrite: bool = option("replace outputs of another configuration")
    wait: bool = option("on a cluster, follow the jobs until they end", False)
    action: str = option(
        "what to do: run; status, logs or cancel of earlier jobs; upgrade: judge the rows of an "
        "upgrade; watch: evaluate each checkpoint of a training run (python -m inference.compare "
        "compares reports)",
        "run",
        choices=("run", "status", "logs", "cancel", "upgrade", "watch"),
    )
    run_dir: Path | None = option(
        "results folder that action works on; null: that of the last run", None, is_path=True
    )
    container: str | None = option("image of every job: registry path or .sqsh file")
    container_mounts: list[str | None] = option("further mounts", form=_MOUNT)
    env_vars: Fields = option("environment of every job; null entries are left out")
    wandb_api_key_file: str | None = option("accepted; nothing is sent", None)
    numa_mapping: Fields = option("accepted; only for training", {})
    bcp_no_redirect: bool = option("on bcp, all ranks write to the job's log", True)
    debug: bool = option("accepted; HYDRA_FULL_ERROR=1 shows tracebacks", False)
    ci_test: bool = option("accepted for compatibility", False)
    api_log: bool = option("accepted for compatibility", False)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    export: ExportSection = field(default_factory=ExportSection)
    convert: ConvertSection = field(default_factory=ConvertSection)
    deploy: DeploySection = field(default_factory=DeploySection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    certify: CertifySection = field(default_factory=CertifySection)
    watch: WatchSection = field(default_factory=WatchSection)
    upgrade: UpgradeSection = field(default_factory=UpgradeSection)

    def __post_init__(self) -> None:
        self.stages = [_STAGE_ALIASES.get(name, name) for name in self.stages]

    def at(self, key: str) -> Any:
        """Return the value of a key, such as `deploy.http_port`, or the section of that name."""
        return operator.attrgetter(key)(self)

    @property
    def is_dry_run(self) -> bool:
        """Whether scripts are written and nothing is started."""
        return self.dry_run or is_set(DEBUG)

    @property
    def plans_remotely(self) -> bool:
        """Whether scripts are written for a cluster whose files this machine may not see."""
        return self.is_dry_run and self.cluster_type != "local"

    @property
    def results_dir(self) -> Path:
        """The folder that holds a folder for each stage."""
        return self.export.run.results_dir

    def image_of(self, stage: str) -> str | None:
        """Return the image in which a stage runs, None for none."""
        own = self.deploy.container if stage == "deploy" else None
        return own or self.container


# The sections whose file the command line chooses.
GROUPS = tuple(each.name for each in fields(Config) if is_dataclass(each.default_factory))
KEYS: Mapping[str, Key] = {key.name: key for key in keys_of(Config)}
SECTIONS = {name.rsplit(".", depth)[0] for name in KEYS for depth in range(1, name.count(".") + 1)}
