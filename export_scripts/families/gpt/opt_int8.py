"""Static int8 weights of an OPT from measured activation ranges (int8_mode 2).

The ranges are a table {module: {"input": max |x|, "output": max |y|}}. Formulas: FasterTransformer,
examples/pytorch/gpt/utils/huggingface_opt_convert.py; the scales are always fp32,
as the loader reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from export_scripts.errors import CheckpointMismatchError
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
    if problems:
        raise CheckpointMismatchError(problems)


def int8_weights(ranges: Ranges) -> dict[str, PerIndex]:
    """Return the sources of the int8 weights and their scales."""
    return {
        f"{LAYER}{name}.{suffix}": PerIndex(_chooser(modules, ranges, kind))
        for name, modules in _MODULES.items()
        for suffix, kind in (
            ("weight.int8", _quantized),
            ("scale", _scale),
            ("scale_inter", _scale_inter),
            ("scale_out", _scale_out),
        )
    }


def _chooser(modules: tuple[str, ...], ranges: Ranges, kind: Any) -> Any:
    keys = tuple(f"{_L}{module}.weight" for module in modules)

    def choose(index: Mapping[str, int | str]) -> TensorSource:
        entries = [ranges[_L.format(**index) + module] for module in modules]

        def compute(config: GPTConfig, *weights: Any) -> Any:
            return kind(config, weights, entries)

        return Compute(compute, keys)

    return choose


def _quantized(_config: GPTConfig, weights: Any, _entries: Any) -> Any:
    """Return round(w * 127 / max |w|), each module by its own largest weight."""
    if isinstance(weights[0], ShapeTensor):
        parts = [weight.T for weight in weights]
    else:
        parts = [(float32(w).T * _weight_scale(w)).round() for w in weights]
    return parts[0] if len(parts) == 1 else stacked(parts, 1)  # (in[, parts], out)


def _weight_scale(weight: Any) -> float:
    """Return 127 / max |w|, divided in fp32.

    Raises:
        CheckpointMismatchError: All weights are zero.
    """
    largest = abs(float32(weight)).max()
    if largest == 0:
        raise CheckpointMismatchError("weights that are all zero have no int8 scale")
    return float(constant([_LARGEST])[0] / largest)


def _scale(_: GPTConfig, weights: Any, entries: Any) -> Any:
    """Return 127 / max |input|."""
    return _tensor(_scales(weights, entries, "input"), weights)


def _scale_out(_: GPTConfig, weights: Any, entries: Any) -> Any:
    """Return max |output| / 127."""
    return _tensor([entry["output"] / _LARGEST for entry in entries], weights)


def _scale_inter(config: GPTConfig, weights: Any, entries: Any) -> Any:
    """Return scale of output / (scale of input * scale of weight); QKV: one per local column."""
    quotients = []
    if not isinstance(weights[0], ShapeTensor):
        triples = zip(
            _scales(weights, entries, "output"),
            _scales(weights, entries, "input"),
            (_weight_scale(weight) for weight in weights),
            strict=True,
        )
        quotients = [after / (before * weight) for after, before, weight in triples]
    values = _tensor(quotients, weights)
    if len(weights) == 1:
        return values
    return values[:, None].repeat(config.local_hidden, 1)


def _scales(weights: Any, entries: Any, side: str) -> list[float]:
    """Return 127 / range of each module; the parts of QKV are rounded to fp32 on the way.

    NVIDIA's converter gathers those in an fp32 array and keeps the others as Python numbers.
    """
    if len(entries) == 1 or isinstance(weights[0], ShapeTensor):
        return [_LARGEST / entry[side] for entry in entries]
    quotients = constant([_LARGEST]) / constant([entry[side] for entry in entries])
    return [float(value) for value in quotients]


def _tensor(numbers: list[float], weights: Any) -> Any:
    """Return fp32 values, one per module."""
    if isinstance(weights[0], ShapeTensor):
        return ShapeTensor((len(weights),))
    return constant(numbers)
