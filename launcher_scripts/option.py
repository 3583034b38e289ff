"""One key of the configuration: a dataclass field with its meaning, its choices and its bounds."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def option(
    text: str,
    default: Any = MISSING,
    *,
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    path: bool = False,
) -> Any:
    """Return a dataclass field with its meaning, its choices and whether it names a file."""
    metadata = {"text": text, "choices": choices, "minimum": minimum, "path": path}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        name: dotted name.
        type: its Python type.
    """

    name: str
    type: Any
    text: str
    choices: tuple[Any, ...]
    minimum: float | None
    is_path: bool


def keys_of(root: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(root)
    for each in dataclasses.fields(root):
        name = f"{prefix}{each.name}"
        kind = hints[each.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from keys_of(kind, f"{name}.")
            continue
        facts = each.metadata
        yield Key(
            name, kind, facts["text"], facts["choices"], facts["minimum"], bool(facts["path"])
        )
