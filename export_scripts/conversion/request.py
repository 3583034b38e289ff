"""The request for a conversion, and its checks that need no checkpoint."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from export_scripts.checkpoints.hub import hub_advice
from export_scripts.families import FAMILIES
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from export_scripts.suggest import did_you_mean

# Model types users type -> the families they may be.
MODEL_TYPES: Mapping[str, tuple[str, ...]] = {"gpt3": ("gpt", "llama"), "mt5": ("t5",)}


@dataclass(frozen=True)
class ConversionRequest:
    """A request to convert a checkpoint.

    Attributes:
        checkpoint_path: File or folder of the source.
        checkpoint_name: Name, or pattern, of one of several checkpoints in that folder; None for
            the last.
        output_dir: Folder under which <tp_size>-gpu appears.
        tp_size: Tensor-parallel ranks of inference.
        weight_data_type: "fp32", "fp16" or "bf16".
        processes: Workers.
        prompt_checkpoints: Prompt-learning archives to add.
        ia3_checkpoints: IA3 archives to add, one task each.
        ia3_in_place: Multiply the IA3 scalers into the weights.
        adapter_checkpoints: Linear adapter archives to add.
        activation_ranges: File of activation ranges, for static int8 weights.
        vocab_path: Vocabulary (or sentencepiece model) in place of the checkpoint's.
        merges_path: Merges in place of the checkpoint's.
        overwrite: Replace a folder that holds something else.
        allow: Patterns of tensor names accepted although unknown or non-finite.
        model_type: Kind the user expects ("gpt3", "t5", "mt5", a family); None for any.
        pp_size: Pipeline stages of inference; must divide the layers.
        given: (config key, value) pairs that the source lacks.
        for_text: Whether the folder must hold a tokenizer, for text models.
    """

    checkpoint_path: Path
    output_dir: Path
    tp_size: int
    weight_data_type: str
    processes: int = 1
    prompt_checkpoints: tuple[Path, ...] = ()
    ia3_checkpoints: tuple[Path, ...] = ()
    ia3_in_place: bool = False
    adapter_checkpoints: tuple[Path, ...] = ()
    activation_ranges: Path | None = None
    vocab_path: Path | None = None
    merges_path: Path | None = None
    overwrite: bool = False
    allow: tuple[str, ...] = ()
    model_type: str | None = None
    pp_size: int = 1
    given: tuple[tuple[str, str], ...] = ()
    for_text: bool = False
    checkpoint_name: str | None = None

    def allows(self, name: str) -> bool:
        """Return whether the user accepts a tensor that would otherwise be an error."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow)


# Names of a request's fields in messages; callers with other names pass their own.
OPTION_NAMES: Mapping[str, str] = {
    "checkpoint_path": "--checkpoint-path",
    "checkpoint_name": "--checkpoint-name",
    "output_dir": "--output-dir",
    "tp_size": "--tensor-model-parallel-size",
    "pp_size": "--pipeline-model-parallel-size",
    "weight_data_type": "--weight-data-type",
    "processes": "--processes",
    "model_type": "--model-type",
    "prompt_checkpoints": "--prompt-checkpoint",
    "ia3_checkpoints": "--ia3-checkpoint",
    "adapter_checkpoints": "--adapter-checkpoint",
    "activation_ranges": "--activation-ranges",
    "vocab_path": "--vocab-path",
    "merges_path": "--merges-path",
    "given": "--set",
    "overwrite": "--overwrite",
    "for_text": "for_text",  # not an option: this command does not serve
}


def request_problems(request: ConversionRequest, names: Mapping[str, str]) -> list[str]:
    """Return the problems of the request itself."""
    problems = []
    for key, value in (
        ("tp_size", request.tp_size),
        ("pp_size", request.pp_size),
        ("processes", request.processes),
    ):
        if value < 1:
            problems.append(f"{names[key]}={value} is not a positive number")
    if request.weight_data_type not in WEIGHT_DATA_TYPES:
        problems.append(
            f"{names['weight_data_type']}={request.weight_data_type} is unknown; "
            f"use {', '.join(WEIGHT_DATA_TYPES)}"
        )
    problems += [
        f"{names[key]}={path} does not exist; check the spelling, and that this machine sees it"
        + (hub_advice(Path(path)) if key == "checkpoint_path" else "")
        for key, paths in _source_paths(request).items()
        for path in paths
        if path is not None and not Path(path).exists()
    ]
    problems += _output_problems(Path(request.output_dir), names["output_dir"])
    kinds = (*MODEL_TYPES, *FAMILIES)
    if request.model_type is not None and request.model_type not in kinds:
        problems.append(
            f"{names['model_type']}={request.model_type} is unknown"
            f"{did_you_mean(request.model_type, kinds)}; use {', '.join(kinds)}"
        )
    return problems


def _source_paths(request: ConversionRequest) -> Mapping[str, tuple[Path | None, ...]]:
    return {
        "checkpoint_path": (request.checkpoint_path,),
        "prompt_checkpoints": request.prompt_checkpoints,
        "ia3_checkpoints": request.ia3_checkpoints,
        "adapter_checkpoints": request.adapter_checkpoints,
        "activation_ranges": (request.activation_ranges,),
        "vocab_path": (request.vocab_path,),
        "merges_path": (request.merges_path,),
    }


def _output_problems(output_dir: Path, name: str) -> list[str]:
    """Return a problem if `output_dir` cannot be created."""
    path = output_dir.absolute()
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        return [f"{name}={output_dir}: {nearest} is not a folder; choose another place"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [f"{name}={output_dir}: {nearest} is not writable; choose another place"]
    return []
