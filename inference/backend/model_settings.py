"""What a generation model's config.pbtxt asks of the engine, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.backend.triton_model import ModelArguments
from inference.engine.options import EngineOptions
from inference.plain_path import native_path
from inference.ranks.settings import Placement

DATA_TYPES = ("fp32", "fp16", "bf16")


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise ValueError(f"must be a whole number of at least {low}")
        return int(text)

    return parse


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("must be a number of seconds above 0")
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


# Parameters and their checks; the first three are required.
_REQUIRED: dict[str, Callable[[str], Any]] = {
    "tensor_para_size": _at_least(1),
    "pipeline_para_size": _at_least(1),
    "data_type": _one_of(*DATA_TYPES),
}
_OPTIONAL: dict[str, Callable[[str], Any]] = {
    "model_type": str,
    "model_checkpoint_path": str,
    "int8_mode": _at_least(0),
    "enable_custom_all_reduce": _at_least(0),
    "device": _one_of("auto", "cpu", "cuda"),
    "is_sparse": _one_of("0"),
    "is_remove_padding": _flag,
    "strict_lengths": _flag,
    "stream_new_tokens": _flag,
}
# Fields of EngineOptions, whose own checks follow.
_ENGINE: dict[str, Callable[[str], Any]] = {
    "max_lanes": _at_least(1),
    "max_seq_len": _at_least(1),
    "kv_cache_bytes": _at_least(1),
    "max_queued_rows": _at_least(1),
    "max_stall_s": _seconds,
    "threads": _at_least(1),
    "shared_memory": _flag,
    "rank_timeout_s": _seconds,
    "start_timeout_s": _seconds,
    "output_log_probs_mode": _one_of("renormalized", "full"),
    "nucleus_include_boundary": _flag,
}
PARAMETERS = _REQUIRED | _OPTIONAL | _ENGINE
# Parameters that are fields of `Placement`.
_PLACEMENT = {
    "tensor_para_size": "tp_size",
    "pipeline_para_size": "pp_size",
    "data_type": "data_type",
    "int8_mode": "int8_mode",
    "device": "device",
}
_DIRECT = (
    "model_type",
    "is_remove_padding",
    "strict_lengths",
    "stream_new_tokens",
)


@dataclass(frozen=True)
class ModelSettings:
    """The checked parameters of a model and where its weights are."""

    checkpoint_path: Path
    placement: Placement
    model_type: str = "GPT"
    is_remove_padding: bool = False
    strict_lengths: bool = False
    stream_new_tokens: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)
    unknown: tuple[str, ...] = ()  # parameters that mean nothing here


def read_settings(arguments: ModelArguments) -> ModelSettings:
    """Return the settings of a model.

    Raises:
        ValueError: parameters are missing or wrong; all of them are listed.
    """
    values: dict[str, Any] = {}
    problems = [
        f"parameter {key} is missing" for key in _REQUIRED if key not in arguments.parameters
    ]
    for key, check in PARAMETERS.items():
        if key in arguments.parameters:
            text = arguments.parameters[key]
            try:
                values[key] = check(text)
            except ValueError as error:
                problems.append(f"parameter {key}={text!r}: {error}")
    if problems:
        name = arguments.model_folder.name
        raise ValueError("\n".join(f"config.pbtxt of {name}: {problem}" for problem in problems))
    direct = {key: values[key] for key in _DIRECT if key in values}
    options = {key: values[key] for key in _ENGINE if key in values}
    if arguments.session_idle_s is not None:
        options["session_idle_s"] = arguments.session_idle_s
    return ModelSettings(
        checkpoint_path=_checkpoint_path(arguments, values),
        placement=Placement(
            **{field: values[key] for key, field in _PLACEMENT.items() if key in values}
        ),
        engine=EngineOptions(**options),
        unknown=tuple(sorted(set(arguments.parameters) - set(PARAMETERS))),
        **direct,
    )


def _checkpoint_path(arguments: ModelArguments, values: dict[str, Any]) -> Path:
    """Return where the weights are.

    The parameter as it is, else `<model>/<version>/<default_model_filename>`, else
    `<model>/<version>/<tensor_para_size>-gpu`. In the Python backend default_model_filename names
    the script, which does not count.
    """
    if "model_checkpoint_path" in values:
        return native_path(values["model_checkpoint_path"])
    name = str(arguments.config.get("default_model_filename", ""))
    if not name or name.endswith(".py"):
        name = f"{values['tensor_para_size']}-gpu"
    # The repository may be a link of this machine; ranks elsewhere need its own name.
    return (arguments.version_folder / name).resolve()
