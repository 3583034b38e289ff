"""The model of an existing repository: how many ranks it needs, as its config.pbtxt says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.parameters import PARAMETERS


@dataclass(frozen=True)
class ServedModel:
    """What a submission has to know of a model that was exported elsewhere."""

    name: str
    tp_size: int
    pp_size: int
    device: str = "auto"


def served_model_of(repository: Path) -> ServedModel | None:
    """Return the model with ranks in a repository; None if there is none, or several.

    A file that cannot be read counts as none: the server says what is wrong with it.
    """
    found = [
        model
        for path in sorted(repository.glob("*/config.pbtxt"))
        if (model := _read(path)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _read(path: Path) -> ServedModel | None:
    try:
        given = parse_config(path.read_text(encoding="utf-8")).parameters
        values: dict[str, Any] = {
            key: PARAMETERS[key].read(given[key].string_value)
            for key in ("tensor_para_size", "pipeline_para_size", "device")
            if key in given
        }
    except (OSError, ValueError):
        return None
    if "tensor_para_size" not in values:
        return None
    return ServedModel(
        name=path.parent.name,
        tp_size=values["tensor_para_size"],
        pp_size=values.get("pipeline_para_size", 1),
        device=values.get("device", "auto"),
    )
