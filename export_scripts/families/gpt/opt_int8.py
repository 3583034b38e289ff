"""Static int8 weights of an OPT from measured activation ranges (int8_mode 2).

The ranges are a table {module: {"input": max |x|, "output": max |y|}}. Formulas: FasterTransformer,
examples/pytorch/gpt/utils/huggingface_opt_convert.py; the scales are always fp32,
as the loader reads them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.errors import CheckpointMismatchError, refuse
from export_scripts.families.gpt.layout import GPTConfig
from export_scripts.families.layout.decoder import LAYER
from export_scripts.families.mapping.sources import Compute, PerIndex, TensorSource
from export_scripts.families.mapping.tensors import ShapeTensor, constant, float32, stacked

_LARGEST = 127.0

_L = "model.decoder.layers.{layer}."
# FT matrix -> the source's modules it consists of.
_MODULES = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.out_proj",),
    "mlp.dense_h_to_4h": ("fc1",),
    "mlp.dense_4h_to_h": ("fc2",),
}

Ranges = Mapping[str, Any]


def check_ranges(ranges: Ranges, num_layer: int) -> None:
    """Check that every module has both ranges.

    Raises:
        CheckpointMismatchError: Some are missing, non-positive or non-finite; all are named.
    """
    problems = []
    for layer in range(num_layer):
        for module in (name for parts in _MODULES.values() for name in parts):
            key = _L.format(layer=layer) + module
            for side in ("input", "output"):
                entry = ranges.get(key)
                value = entry.get(side) if isinstance(entry, Mapping) else None
                if not isinstance(value, (int, float)) or not 0 < value < math.inf:
                    problems.append(f"activation ranges: {key} has {side} = {value!r}")
    refuse(problems)


def int8_weights(ranges: Ranges) -> dict[str, TensorSource]:
    """Return the sources of the int8 weights and their scales."""

    def source(
        modules: tuple[str, ...], suffix: str, index: Mapping[str, int | str]
    ) -> TensorSource:
        entries = [ranges[_L.format(**index) + module] for module in modules]

        def compute(config: GPTConfig, *weights: Any) -> Any:
            if not isinstance(weights[0], ShapeTensor):
                return _VALUES[suffix](config, weights, entries)
            if suffix == "weight.int8":
                return _side_by_side([weight.T for weight in weights])
            parts = len(weights)
            is_wide = suffix == "scale_inter" and parts > 1
            return ShapeTensor((parts, config.local_hidden) if is_wide else (parts,))

        return Compute(compute, tuple(f"{_L}{module}.weight" for module in modules))

    return {
        f"{LAYER}{name}.{suffix}": PerIndex(functools.partial(source, modules, suffix))
        for name, modules in _MODULES.items()
        for suffix in _VALUES
    }


def _side_by_side(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else stacked(parts, 1)  # (in[, parts], out)


def _quantized(_config: GPTConfig, weights: Any, _entries: Any) -> Any:
    """Return round(w * 127 / max |w|), each module by its own largest weight."""
    return _side_by_side([(float32(w).T * _weight_scale(w)).round() for w in weights])


def _weight_scale(weight: Any) -> float:
    """Return 127 / max |w|, divided in fp32."""
    largest = abs(float32(weight)).max()
    if largest == 0:
        raise CheckpointMismatchError("weights that are all zero have no int8 scale")
    return float(constant([_LARGEST])[0] / largest)


def _scale_inter(config: GPTConfig, weights: Any, entries: Any) -> Any:
    """Return scale of output / (scale of input * scale of weight); QKV: one per local column."""
    scales = zip(_scales(entries, "output"), _scales(entries, "input"), weights, strict=True)
    values = constant([after / (before * _weight_scale(each)) for after, before, each in scales])
    return values if len(weights) == 1 else values[:, None].repeat(config.local_hidden, 1)


def _scales(entries: Any, side: str) -> list[float]:
    """Return 127 / range of each module; the parts of QKV are rounded to fp32 on the way.

    NVIDIA's converter gathers those in an fp32 array and keeps the others as Python numbers.
    """
    if len(entries) == 1:
        return [_LARGEST / entry[side] for entry in entries]
    quotients = constant([_LARGEST]) / constant([entry[side] for entry in entries])
    return [float(value) for value in quotients]


# What a tensor of the layout holds, one fp32 number for each module but the weights.
_VALUES: Mapping[str, Callable[..., Any]] = {
    "weight.int8": _quantized,
    "scale": lambda _config, _weights, entries: constant(_scales(entries, "input")),
    "scale_inter": _scale_inter,
    "scale_out": lambda _config, _weights, entries: constant(
        [entry["output"] / _LARGEST for entry in entries]
    ),
}
