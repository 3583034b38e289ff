"""The schema of the configuration, as dataclasses: every key, its type and its meaning.

Values are in conf/; a field has a default here only where files written for the NeMo launcher lack
the key. The texts are printed by `--help` and quoted by error messages.
"""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is what belongs there

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from export_scripts.families import FAMILIES
from export_scripts.values import NODE_CPUS, NODE_MEMORY_GB, Key, keys_of, option
from inference.evaluation.options import EvaluateSection
from inference.gateway.access import DEFAULT_MAX_REQUEST_MB
from inference.openai.options import DEFAULT_PORT
from launcher_scripts.configuration.cluster_section import CLUSTERS, ClusterSection

DATA_TYPES = ("fp32", "fp16", "bf16")
# Bounds beyond which a number can only be a typing error.
_RANKS, _NODE_GPUS = 4096, 64
_TOKENS, _SECONDS, _PORT = 1 << 20, 30 * 24 * 3600, 65535
_INT32 = (1 << 31) - 1  # numbers of config.pbtxt


@dataclass
class RunSection:
    """`export.run`: names, folders and resources of the exported model."""

    name: str = option("name of the convert and export jobs", name=True)
    time_limit: Any = option("MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS")
    model_train_name: str = option("name of the trained model", name=True)
    dependency: str | None = option("dependency of the first job, such as singleton", None)
    training_dir: str | None = option("folder of the training run", None, path=True)
    config_summary: str = option("distinguishes exports of one model in folder names", name=True)
    results_dir: str = option("folder of this export: logs, repository and report", path=True)
    model_type: str = option("kind of checkpoint: gpt3, t5, mt5, ...")
    gpus_per_node: int | None = option(
        "GPUs for convert and export, which need none", None, within=(1, _NODE_GPUS)
    )
    cpus_per_task: int | None = option(
        "CPU cores for convert and export", None, within=(1, NODE_CPUS)
    )
    mem_gb: float | None = option(
        "memory for convert and export, in GB", None, within=(0, NODE_MEMORY_GB)
    )


@dataclass
class SizesSection:
    """`export.model.sizes`: a model to plan for (dry_run=true) before its checkpoint is here."""

    family: str | None = option("its family", None, choices=tuple(FAMILIES))
    hidden: int | None = option("width of the residual stream", None, within=(1, _TOKENS))
    layers: int | None = option("layers; of a T5, those of each stack", None, within=(1, 10_000))
    heads: int | None = option("attention heads", None, within=(1, _TOKENS))
    vocab: int = option("tokens", 51200, within=(1, _INT32))
    inter_size: int | None = option("width of the MLP; null: 4 x hidden", None, within=(1, _INT32))
    positions: int = option("longest sequence, where there is a limit", 2048, within=(1, _TOKENS))


@dataclass
class ModelSection:
    """`export.model`: the checkpoint and how its weights are divided."""

    checkpoint_path: str = option(
        "a .nemo file, an unpacked one, a folder of checkpoints, or the id of a cached model of "
        "the Hugging Face hub",
        path=True,
    )
    checkpoint_name: str | None = option(
        "of several checkpoints in that folder, the one of this name or pattern; null: the last",
        None,
    )
    tensor_model_parallel_size: int = option(
        "GPUs that share each layer when serving; must divide the heads", within=(1, _RANKS)
    )
    weight_data_type: str = option("stored type of the weights", choices=DATA_TYPES)
    processes: int = option("processes that convert in parallel", within=(1, NODE_CPUS))
    load_checkpoints_to_cpu: bool = option(
        "accepted for compatibility: checkpoints are always read on the CPU", False, ignored=True
    )
    sizes: SizesSection = field(default_factory=SizesSection)


@dataclass
class TritonDeploymentSection:
    """`export.triton_deployment`: contents of the Triton repository."""

    triton_model_dir: str = option(
        "folder of the served model; its parent is the Triton repository", path=True
    )
    max_batch_size: int = option("largest batch that the server accepts", within=(1, _INT32))
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
        "engines of the model in one server, each on GPUs or cores of its own", 1, within=(1, 1024)
    )
    model_type: str | None = option("model type to serve the weights as, such as T5-Encoder", None)
    parameters: dict[str, Any] = option("further parameters of the model's config.pbtxt", {})


@dataclass
class BenchmarkSection:
    """`export.benchmark`: how long to wait for the server; `evaluate.latency` does the rest."""

    input_len: int = option(
        "accepted for compatibility: see evaluate.latency.shapes",
        60,
        within=(1, _TOKENS),
        ignored=True,
    )
    output_len: int = option(
        "accepted for compatibility: see evaluate.latency.shapes",
        20,
        within=(1, _TOKENS),
        ignored=True,
    )
    batch_sizes: list[int] = option(
        "accepted for compatibility: see evaluate.latency.batch_sizes",
        [1, 2, 4, 8, 16, 32, 64, 128, 256],
        within=(1, _INT32),
        ignored=True,
    )
    triton_wait_time_s: float = option("seconds to wait for the server", 300, within=(0, _SECONDS))
    vocab_size: int = option(
        "accepted for compatibility: prompts are real text",
        51200,
        within=(1, _INT32),
        ignored=True,
    )


@dataclass
class AccuracySection:
    """`export.accuracy`: measure the exported model as part of the export."""

    enabled: bool = option("run evaluate after export", False)
    test_data: str | None = option("passages to evaluate with, JSON Lines", None, path=True)
    reference: str | None = option("figures of another implementation for them", None, path=True)


@dataclass
class ExportSection:
    """`export`: the model to serve (conf/export/<family>/<name>.yaml)."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    triton_deployment: TritonDeploymentSection = field(default_factory=TritonDeploymentSection)
    benchmark: BenchmarkSection = field(default_factory=BenchmarkSection)
    accuracy: AccuracySection = field(default_factory=AccuracySection)


@dataclass
class ConvertSection:
    """`convert`: options of the conversion beyond those of `export.model`."""

    prompt_checkpoints: list[str] = option("p-tuning checkpoints to add", path=True)
    ia3_checkpoints: list[str] = option("IA3 adapters to add, one task each", path=True)
    ia3_in_place: bool = option("multiply the IA3 scalers into the weights")
    adapter_checkpoints: list[str] = option("linear adapters to add", path=True)
    activation_ranges: str | None = option("activation ranges, for static int8 weights", path=True)
    vocab_path: str | None = option("vocabulary to use instead of the checkpoint's", path=True)
    merges_path: str | None = option("BPE merges to use instead of the checkpoint's", path=True)
    allow: list[str] = option("tensors (patterns) that may be unknown or not finite")
    given: dict[str, Any] = option("config.ini values that the checkpoint does not record", {})


@dataclass
class GemmTuningSection:
    """`deploy.gemm_tuning`: measure NVIDIA's matrix products before the server starts."""

    enabled: bool = option("measure; engine fastertransformer only", False)
    batch_size: int = option("sequences in the largest request", 8, within=(1, _INT32))
    beam_width: int = option("beams of the largest request", 1, within=(1, 1024))
    input_len: int = option("tokens of the longest prompt", 128, within=(1, _TOKENS))
    program_dir: str = option(
        "folder of gpt_gemm, t5_gemm and bert_gemm", "/opt/FasterTransformer/build/bin", path=True
    )


@dataclass
class OpenAISection:
    """`deploy.openai`: an endpoint of OpenAI's protocol next to Triton's."""

    enabled: bool = option("serve it", False)
    port: int = option("its port; 0 takes a free one", DEFAULT_PORT, within=(0, _PORT))
    tokenizer: str | None = option(
        "folder of the tokenizer's files; null: the repository's own", None, path=True
    )


@dataclass
class DeploySection:
    """`deploy`: the server (conf/deploy/default.yaml)."""

    name: str = option("name of the job", name=True)
    time_limit: Any = option("the server is stopped after this time; notation as in export.run")
    engine: str = option(
        "runtime of the model: pytorch (Slipway's engine) or fastertransformer (NVIDIA's backend)",
        choices=("pytorch", "fastertransformer"),
    )
    server: str = option(
        "triton (tritonserver and the repository) or pytriton (PyTriton: text in, text out)",
        "triton",
        choices=("triton", "pytriton"),
    )
    interface: str = option(
        "tensors of pytriton's model: text, nemo (of PyTriton's NeMo example) or nemo-deploy (of "
        "NeMo's NemoQueryLLM)",
        "text",
        choices=("text", "nemo", "nemo-deploy"),
    )
    repository: str | None = option(
        "serve this repository instead of the exported one; s3://bucket/prefix: export publishes "
        "there, and the server loads from there",
        path=True,
    )
    endpoint_url: str | None = option("address of an S3-compatible store; null: S3 itself", None)
    container: str | None = option("image of the server; null: the one of `container`", None)
    host: str = option("address to listen on; 0.0.0.0 for every interface")
    http_port: int = option("port of HTTP requests; 0 takes a free one", within=(0, _PORT))
    grpc_port: int = option("port of gRPC requests; 0 takes a free one", within=(0, _PORT))
    metrics_port: int = option(
        "port of the Prometheus metrics; 0 takes a free one", within=(0, _PORT)
    )
    openai: OpenAISection = field(default_factory=OpenAISection)
    max_request_mb: int = option(
        "largest request, in MiB", DEFAULT_MAX_REQUEST_MB, within=(1, 1 << 20)
    )
    tls_cert: str | None = option("certificate chain of the server, PEM", None, path=True)
    tls_key: str | None = option("its key, PEM, of mode 600", None, path=True)
    token_file: str | None = option(
        "accepted tokens, one on each line, of mode 600; a request must carry one", None, path=True
    )
    client_shared_memory: bool = option("clients may register shared memory of their own", False)
    ready_timeout_s: float = option("seconds until every model must be ready", within=(1, _SECONDS))
    drain_s: float = option(
        "seconds that running requests get to finish when the server stops", within=(0, _SECONDS)
    )
    max_restarts: int = option("most restarts after failures", 3, within=(0, _INT32))
    restart_backoff_s: float = option(
        "seconds before the second restart in a row; doubled for each further one",
        5.0,
        within=(0, _SECONDS),
    )
    gemm_tuning: GemmTuningSection = field(default_factory=GemmTuningSection)
    keep: bool = option("keep serving after the evaluation, until Ctrl-C or the time limit")
    gpus_per_node: int | None = option(
        "GPUs for the server; null: as many as TP x PP needs", within=(1, _NODE_GPUS)
    )
    cpus_per_task: int | None = option("CPU cores for the server", within=(1, NODE_CPUS))
    mem_gb: float | None = option("memory for the server, in GB", within=(0, NODE_MEMORY_GB))


@dataclass
class Config:
    """The whole configuration."""

    stages: list[str] = option("what to run: convert, export, deploy, evaluate")
    cluster_type: str = option("where to run", choices=CLUSTERS)
    launcher_scripts_path: str = option("folder that ends in /launcher_scripts", path=True)
    data_dir: str = option("folder of data sets", path=True)
    base_results_dir: str = option("folder of all results", path=True)
    dry_run: bool = option("write and print every job's script and configuration; start nothing")
    overwrite: bool = option("replace outputs of another configuration")
    wait: bool = option("on a cluster, follow the jobs to their end", False)
    action: str = option(
        "what to do: run, look after jobs with status, logs or cancel, or compare evaluations",
        "run",
        choices=("run", "status", "logs", "cancel", "compare"),
    )
    runs: list[str] = option(
        "the two evaluations that action=compare compares: ids, latest, latest~1, or reports",
        ["latest~1", "latest"],
    )
    run_dir: str | None = option(
        "results folder that action works on; null: that of the last run", None, path=True
    )
    container: str | None = option("image of every job: registry path or .sqsh file")
    container_mounts: list[Any] = option("further mounts: /a, or /a:/b")
    env_vars: dict[str, Any] = option("environment of every job; null entries are left out")
    wandb_api_key_file: str | None = option(
        "accepted for compatibility: nothing is sent", None, ignored=True
    )
    numa_mapping: dict[str, Any] = option(
        "accepted for compatibility: training only", {}, ignored=True
    )
    bcp_no_redirect: bool = option("all ranks write to the job's log on bcp", True)
    debug: bool = option("show tracebacks", False)
    ci_test: bool = option("accepted for compatibility", False, ignored=True)
    api_log: bool = option("accepted for compatibility", False, ignored=True)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    export: ExportSection = field(default_factory=ExportSection)
    convert: ConvertSection = field(default_factory=ConvertSection)
    deploy: DeploySection = field(default_factory=DeploySection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)


# The sections that are chosen as files.
GROUPS = tuple(each.name for each in fields(Config) if is_dataclass(each.default_factory))


def keys() -> Iterator[Key]:
    """Yield every key of the configuration, in the order of the dataclasses."""
    return keys_of(Config)
