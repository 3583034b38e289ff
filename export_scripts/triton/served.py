"""Name, parallel sizes and device of the model in an existing repository, from its config.pbtxt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.parameters import PARAMETERS


@dataclass(frozen=True)
class ModelSizes:
    """The facts about an exported model that decide the resources of its server."""

    name: str
    tp_size: int
    pp_size: int
    device: str = "auto"
    instance_count: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of one instance."""
        return self.tp_size * self.pp_size


def served_model_of(repository: Path) -> ModelSizes | None:
    """Return the model with ranks in a repository; None if there is none, or several.

    An unreadable file counts as none: the server reports its problem.
    """
    found = [
        model
        for path in sorted(repository.glob("*/config.pbtxt"))
        if (model := _read(path)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _read(path: Path) -> ModelSizes | None:
    try:
        config = parse_config(path.read_text(encoding="utf-8"))
        given = config.parameters
        values: dict[str, Any] = {
            key: PARAMETERS[key].read(given[key].string_value)
            for key in ("tensor_para_size", "pipeline_para_size", "device")
            if key in given
        }
    except (OSError, ValueError):
        return None
    if "tensor_para_size" not in values:
        return None
    return ModelSizes(
        name=path.parent.name,
        tp_size=values["tensor_para_size"],
        pp_size=values.get("pipeline_para_size", 1),
        device=values.get("device", "auto"),
        # Without a count, a group has one.
        instance_count=sum(group.count or 1 for group in config.instance_group) or 1,
    )
