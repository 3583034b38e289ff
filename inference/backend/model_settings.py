"""Reads and checks a model's settings in config.pbtxt: placement, engine options, weights."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from export_scripts.triton.parameters import FIELDS, PARAMETERS, REQUIRED
from inference.backend.arguments import ModelArguments
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement

_NVIDIA_ONLY = ("enable_custom_all_reduce",)


@dataclass(frozen=True)
class ModelSettings:
    """The checked parameters of a model and the folder of its weights."""

    checkpoint_path: Path
    placement: Placement
    model_type: str = "GPT"
    strict_lengths: bool = False
    stream_new_tokens: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)
    unknown: tuple[str, ...] = ()  # parameters that neither backend has
    without_effect: tuple[str, ...] = ()  # enabled parameters that only NVIDIA's backend implements


def read_settings(arguments: ModelArguments) -> ModelSettings:
    """Return a model's settings. Raises ValueError, which names every wrong parameter."""
    parameters, values, problems = arguments.parameters, dict[str, Any](), []
    for key, parameter in PARAMETERS.items():
        if key in parameters:
            try:
                values[key] = parameter.kind.read(parameters[key])
            except ValueError as error:
                problems.append(f"parameter {key}={parameters[key]!r}: {error}")
        # Older files have is_half instead of data_type.
        elif parameter.default == REQUIRED and not (key == "data_type" and "is_half" in parameters):
            problems.append(f"parameter {key} is missing")
    if problems:
        name = arguments.model_folder.name
        raise ValueError("\n".join(f"config.pbtxt of {name}: {problem}" for problem in problems))
    values.setdefault("data_type", "fp16" if values.get("is_half") else "fp32")
    if arguments.session_idle_s is not None:
        values["session_idle_s"] = arguments.session_idle_s
    return ModelSettings(
        checkpoint_path=_checkpoint_path(arguments, values),
        placement=Placement(**_fields_of(Placement, values)),
        engine=EngineOptions(**_fields_of(EngineOptions, values)),
        unknown=tuple(sorted(set(parameters) - set(PARAMETERS))),
        without_effect=tuple(key for key in _NVIDIA_ONLY if values.get(key)),
        **_fields_of(ModelSettings, values),
    )


def _fields_of(record: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of those parameters that are fields of a dataclass."""
    by_field = {FIELDS.get(key, key): value for key, value in values.items()}
    return {f.name: by_field[f.name] for f in fields(record) if f.name in by_field}


def _checkpoint_path(arguments: ModelArguments, values: dict[str, Any]) -> Path:
    """Return the folder of the weights.

    It is the parameter model_checkpoint_path, relative to the server's working directory as in
    NVIDIA's backend, else `<model>/<version>/<default_model_filename>`, else
    `<model>/<version>/<tensor_para_size>-gpu`. A default_model_filename that names the Python
    backend's script is ignored. Raises ValueError if the parameter's folder does not exist.
    """
    text = values.get("model_checkpoint_path")
    if text is None:
        name = str(arguments.config.get("default_model_filename", ""))
        if not name or name.endswith(".py"):
            name = f"{values['tensor_para_size']}-gpu"
        # Ranks on other nodes need the real path if the repository is a link on this machine.
        return (arguments.version_folder / name).resolve()
    # Converts to this process's file-system encoding; an ASCII locale escapes other bytes.
    folder = Path(os.fsdecode(text.encode()))
    path = Path.cwd() / folder
    if path.is_dir():
        return path
    reason = "does not exist on this machine; mount it there, or give the folder of the weights."
    if not folder.is_absolute():
        reason = (
            f"is relative, and there is no such folder in {Path.cwd()}, where the server was "
            "started; start it in the folder that the path begins in, or give the absolute path."
        )
    raise ValueError(
        f"config.pbtxt of {arguments.model_folder.name}: parameter model_checkpoint_path={text} "
        f"{reason}"
    )
