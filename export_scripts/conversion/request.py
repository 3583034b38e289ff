"""The request for a conversion, and its checks that need no checkpoint."""

# ruff: noqa: RUF009 - `option` returns a dataclass field, which is a valid default

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export_scripts.conversion.hub import hub_advice
from export_scripts.ft.layout import ft_directory
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from foundations.files.disk import folder_problem
from foundations.suggest import did_you_mean, matches_any
from foundations.values import option

# Output formats: shards for this engine and FT's backend, a folder for other engines, an adapter
# without its model for these, and a checkpoint from which Megatron-LM continues training.
PEFT, TORCH_DIST, HYBRID = "peft", "torch_dist", "hybrid"
PEFT_CONFIG = "adapter_config.json"
OUTPUT_FORMATS = ("fastertransformer", "huggingface", PEFT, TORCH_DIST)

# Model types as users write them -> possible families.
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    "gpt3": ("gpt", "llama", "mixture", "hybrid"),
    "mt5": ("t5",),
}


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """Options of both the command `convert` and the configuration's section `convert`."""

    max_shard_bytes: int = option(
        "largest size of a file in a Hugging Face folder or a torch_dist checkpoint; by default "
        "5 GB, as in transformers",
        5_000_000_000,
        within=(1, 1 << 50),
    )
    fp8: str | None = option(
        "write the matrices of a Hugging Face folder in FP8, with a scale for each block of "
        "128 x 128, row (channel) or matrix (tensor)",
        None,
        choices=("block", "channel", "tensor"),
    )
    megatron_model: str = option(
        "model of megatron-core in a torch_dist checkpoint: GPTModel (gpt) or HybridModel (hybrid)",
        "gpt",
        choices=("gpt", HYBRID),
    )
    prompt_checkpoints: tuple[Path, ...] = option(
        "prompt-learning archives to add", (), is_path=True
    )
    ia3_checkpoints: tuple[Path, ...] = option(
        "IA3 archives to add, one task each", (), is_path=True
    )
    ia3_in_place: bool = option(
        "multiply the IA3 scalers into the weights instead of storing them", False
    )
    adapter_checkpoints: tuple[Path, ...] = option(
        "linear adapter archives to add", (), is_path=True
    )
    lora_checkpoints: tuple[Path, ...] = option(
        "LoRA adapters (PEFT, NeMo, Megatron Bridge) to merge into the weights, in order; with the "
        "output format peft, the one to write",
        (),
        is_path=True,
    )
    keep_fp8: bool = option(
        "keep the matrices of an FP8 folder and their scales unchanged, for the parameter fp8=1; "
        "by default they are widened",
        False,
    )
    activation_ranges: Path | None = option(
        "activation ranges (.json or .pt), for static int8 weights", None, is_path=True
    )
    model_config: Path | None = option(
        "config.json (or its folder) of the Hugging Face model, for a trainer's checkpoint that "
        "has none",
        None,
        is_path=True,
    )
    vocab_path: Path | None = option(
        "vocabulary or sentencepiece model in place of the checkpoint's", None, is_path=True
    )
    merges_path: Path | None = option("merges in place of the checkpoint's", None, is_path=True)
    vocabulary: str | None = option(
        "rows to keep of a vocabulary that training padded: a number, or `tokenizer` for its "
        "number of IDs",
        None,
    )
    allow: tuple[str, ...] = option(
        "tensors (patterns) that may be unknown, damaged or not finite; with `tokenizer`, one that "
        "has no Hugging Face form is left out",
        (),
    )
    allow_setting: tuple[str, ...] = option(
        "settings (patterns) of the checkpoint that may be unknown or not expressible, if you know "
        "that they do not change what is computed",
        (),
    )


@dataclass(frozen=True)
class ConversionRequest(ConversionOptions):
    """A request to convert a checkpoint."""

    checkpoint_path: Path  # file or folder of the source
    output_dir: Path  # folder in which <tp_size>-gpu, or another output, is written
    tp_size: int  # tensor-parallel ranks of inference
    weight_data_type: str  # "fp32", "fp16" or "bf16"
    processes: int = 1  # number of workers
    overwrite: bool = False  # replace a folder that holds something else
    # The type that the user expects ("gpt3", "t5", "mt5", a family); None for any.
    model_type: str | None = None
    pp_size: int = 1  # pipeline stages of inference; must divide the layers
    given: tuple[tuple[str, str], ...] = ()  # (config key, value) pairs that the source lacks
    for_text: bool = False  # whether the folder must hold a tokenizer, for text models
    # Name or pattern of one of several checkpoints in the folder; None for the last.
    checkpoint_name: str | None = None
    # One of OUTPUT_FORMATS; only shards have ranks.
    output_format: str = "fastertransformer"
    # Names of the other fields in messages, by default the command's options.
    names: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: OPTION_NAMES, repr=False, compare=False
    )

    @property
    def has_shards(self) -> bool:
        """Whether the output is shards, the only output that has ranks."""
        return self.output_format == OUTPUT_FORMATS[0]

    @property
    def folder(self) -> Path:
        """The folder to write."""
        if self.has_shards:
            return ft_directory(self.output_dir, self.tp_size)
        return self.output_dir / self.output_format

    @property
    def sources(self) -> list[tuple[str, Path]]:
        """(name of the field, path) of every file and folder that is read."""
        found = ((name, getattr(self, name)) for name in _SOURCES)
        each = ((name, value if isinstance(value, tuple) else (value,)) for name, value in found)
        return [(name, path) for name, paths in each for path in paths if path is not None]

    def allows(self, name: str) -> bool:
        """Return whether the user allows a tensor that would be refused."""
        return matches_any(name, self.allow)

    def allows_setting(self, name: str) -> bool:
        """Return whether the user allows a setting that would be refused."""
        return matches_any(name, self.allow_setting)


OPTION_NAMES: Mapping[str, str] = {
    **{
        field.name: f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(ConversionRequest)
        if field.compare
    },
    "tp_size": "--tensor-model-parallel-size",
    "pp_size": "--pipeline-model-parallel-size",
    "prompt_checkpoints": "--prompt-checkpoint",
    "ia3_checkpoints": "--ia3-checkpoint",
    "adapter_checkpoints": "--adapter-checkpoint",
    "lora_checkpoints": "--lora",
    "given": "--set",
    "max_shard_bytes": "--max-shard-size",
    "for_text": "for_text",  # not an option, as this command does not serve
}


_SOURCES = (
    "checkpoint_path", "prompt_checkpoints", "ia3_checkpoints", "adapter_checkpoints",
    "lora_checkpoints", "activation_ranges", "model_config", "vocab_path", "merges_path",
)  # fmt: skip


def request_problems(request: ConversionRequest) -> list[str]:
    """Return the problems of the request itself."""
    names = request.names
    problems = [
        f"{names[key]}={value} is not a positive number"
        for key in ("tp_size", "pp_size", "processes", "max_shard_bytes")
        if (value := getattr(request, key)) < 1
    ]
    if request.weight_data_type not in WEIGHT_DATA_TYPES:
        problems.append(
            f"{names['weight_data_type']}={request.weight_data_type} is unknown; "
            f"use {', '.join(WEIGHT_DATA_TYPES)}"
        )
    if request.output_format not in OUTPUT_FORMATS:
        problems.append(
            f"{names['output_format']}={request.output_format} is unknown"
            f"{did_you_mean(request.output_format, OUTPUT_FORMATS)}; use "
            + ", ".join(OUTPUT_FORMATS)
        )
    elif not request.has_shards and request.tp_size != 1:
        problems.append(
            f"{names['tp_size']}={request.tp_size}: a {request.output_format} folder has no ranks; "
            "leave this out"
        )
    if request.megatron_model == HYBRID and request.output_format != TORCH_DIST:
        problems.append(
            f"{names['megatron_model']}={HYBRID} is for {names['output_format']}={TORCH_DIST}"
        )
    if request.fp8 is not None and request.output_format != "huggingface":
        problems.append(
            f"{names['fp8']}={request.fp8} needs a Hugging Face folder, but "
            f"{names['output_format']}={request.output_format}: set that to huggingface"
        )
    if request.output_format == PEFT and len(request.lora_checkpoints) != 1:
        problems.append(
            f"{names['output_format']}=peft writes one adapter, but "
            f"{names['lora_checkpoints']} names {len(request.lora_checkpoints)}: name one, and "
            "convert each separately"
        )
    problems += [
        f"{names[key]}={path} does not exist; check the spelling, and that this machine sees it"
        + (hub_advice(path) if key == "checkpoint_path" else "")
        for key, path in request.sources
        if not path.exists()
    ]
    problems += output_problems(request.output_dir, names["output_dir"])
    from export_scripts.families.table import SOURCE_MAPPINGS  # not imported by a server

    families = (mapping.family.name for mapping in SOURCE_MAPPINGS)
    kinds = tuple(dict.fromkeys((*MODEL_TYPES, *families)))
    if request.model_type is not None and request.model_type not in kinds:
        problems.append(
            f"{names['model_type']}={request.model_type} is unknown"
            f"{did_you_mean(request.model_type, kinds)}; use {', '.join(kinds)}"
        )
    return problems


def output_problems(output_dir: Path, name: str) -> list[str]:
    """Return a problem if no file can be created in `output_dir`."""
    problem = folder_problem(output_dir)
    return [f"{name}={output_dir}: {problem}; choose another place"] if problem else []
