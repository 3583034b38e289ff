"""Conversion of a torch file's object tree into dicts, lists and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.checkpoints.base import StoredTensor
from export_scripts.checkpoints.unpickling import Inert, PendingTensor, StorageType

_MOST_VALUES = 20_000_000


class UnfoldingError(ValueError):
    """An object tree that would be too large with its shared objects repeated."""


class PlainData:
    """Return an object tree as dicts, lists and values.

    A shared object is converted once, and a cycle ends in None. A tree that would be too large if
    nothing were shared is refused: walking over it would not terminate.

    Args:
        tensor_at: Gives the byte range of a tensor.
    """

    def __init__(self, tensor_at: Callable[[PendingTensor], StoredTensor]) -> None:
        self._tensor_at = tensor_at
        self._done: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # values below a container, by the identity of the result

    def __call__(self, value: Any) -> Any:
        """Return `value` as plain data."""
        if isinstance(value, PendingTensor):
            return self._tensor_at(value)
        if isinstance(value, StorageType):
            return value.dtype
        if not isinstance(value, (Inert, Mapping, list, tuple, set, frozenset)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = None
            result = self._done[id(value)] = self._container(value)
            if isinstance(result, (dict, list)):
                self._count(result)
        return self._done[id(value)]

    def _count(self, result: dict[Any, Any] | list[Any]) -> None:
        items = result.values() if isinstance(result, dict) else result
        size = self._sizes[id(result)] = 1 + sum(self._sizes.get(id(item), 1) for item in items)
        if size > _MOST_VALUES:
            raise UnfoldingError(f"its objects unfold to more than {_MOST_VALUES} values")

    def _container(self, value: Any) -> Any:
        if isinstance(value, Inert):
            return self._inert(value)
        if isinstance(value, Mapping):
            return {_plain_key(k): self(v) for k, v in value.items()}
        return [self(item) for item in value]

    def _inert(self, value: Inert) -> Any:
        state = value.state
        if isinstance(state, tuple) and len(state) == 2:  # (attributes, slots), either may be None
            parts = [part for part in state if isinstance(part, Mapping)]
            state = {key: item for part in parts for key, item in part.items()}
        if value.qualified_name.startswith("omegaconf.") and isinstance(state, Mapping):
            # OmegaConf containers hold nodes in _content, nodes their value in _val.
            return self(state["_content"] if "_content" in state else state.get("_val"))
        for contents in (state if isinstance(state, Mapping) else None, value.items):
            if contents:
                return self(contents)
        if value.elements:
            return self(value.elements)
        return self(value.args[0]) if len(value.args) == 1 else None


def _plain_key(key: Any) -> Any:
    return key if isinstance(key, (str, int)) else repr(key)
