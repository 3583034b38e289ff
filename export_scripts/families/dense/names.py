"""The tensors of a dense decoder in a source: its modules, by those of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.families.dense.layout import LAYER, LAYOUT
from export_scripts.families.layout.spec import WeightSpec
from export_scripts.families.mapping.sources import (
    AttentionHeads,
    Copy,
    Get,
    Half,
    Parts,
    TensorSource,
    Transpose,
)

_HEADS = ("attention.query", "attention.key", "attention.value")
_SECOND = "dense_h_to_4h_2"
# Matrices that are stored as sources have them, [out, in].
_AS_STORED = ("model.wte", "model.lm_head", LAYER + "mlp.router")


@dataclass(frozen=True)
class _KeyScales(Copy):
    """Scales of the keys' norm: those of all heads together are repeated like the heads."""

    def build(self, get: Get, config: Any) -> Parts:
        """Return each rank's scales."""
        parts = super().build(get, config)
        times, d = config.stored_kv_head_num // config.kv_head_num, config.size_per_head
        if not config.has_joint_norms or times == 1:
            return parts
        heads = (part.reshape(part.shape[0] // d, d).repeat(times, 0) for part in parts.tensors)
        return Parts(parts.axis, tuple(each.reshape(each.shape[0] * d) for each in heads))


def in_layers(layer: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return names of modules within a layer as names in the whole model."""
    return {LAYER + ours: layer + theirs for ours, theirs in names.items()}


def dense_sources(
    names: Mapping[str, str],
    layout: Sequence[WeightSpec] = LAYOUT,
    *,
    rows: str = "own",
    halves_of_each: bool = False,
) -> dict[str, TensorSource]:
    """Return the source of each tensor of a layout.

    Training ranks, where a source has several, cut each as ranks of the layout do, and embedding
    and head by rows.

    Args:
        names: Modules of the layout and of the source, as complete patterns. Two halves of an MLP
            of one name are the halves of one tensor; a name that ends in "_" is a part of the
            tensor's own.
        layout: The layout.
        rows: How the rows of queries, keys and values are nested, as `AttentionHeads` calls it.
        halves_of_each: Whether each training rank has a part of both halves of an MLP.
    """
    halves = {
        module.removesuffix("_2") + end: which
        for module, theirs in names.items()
        if module.endswith(_SECOND) and names.get(module.removesuffix("_2")) == theirs
        for which, end in enumerate(("", "_2"))
    }
    out: dict[str, TensorSource] = {}
    for spec in layout:
        module, _, kind = spec.name.rpartition(".")
        if spec.name in names:
            module, kind = spec.name, "weight"
        if module not in names:
            continue
        theirs, bare = names[module], module.removeprefix(LAYER)
        key = f"{theirs}{kind}" if theirs.endswith("_") else f"{theirs}.{kind}"
        if bare in _HEADS:
            cut = None if rows == "blocks" else 0
            out[spec.name] = AttentionHeads(key, _HEADS.index(bare), rows, cut)
        elif module in halves:
            out[spec.name] = Half(key, halves[module], halves_of_each)
        elif module in _AS_STORED:
            out[spec.name] = Copy(key, cut=None if module.startswith(LAYER) else 0)
        elif bare == "attention.key_norm":
            out[spec.name] = _KeyScales(key, cut=spec.split)
        elif len(spec.shape) == 2:
            out[spec.name] = Transpose(key, cut=None if spec.split is None else 1 - spec.split)
        else:
            out[spec.name] = Copy(key, cut=spec.split)
    return out
