"""Hugging Face's OPT: computed tensors, static int8 weights, and settings."""

import functools
import itertools
import math
from typing import Any

from export_scripts.families.gpt.layout import LAYOUT, GPTConfig
from export_scripts.families.layout.decoder import HEAD, LAYER
from export_scripts.families.mapping.huggingface import Trait
from export_scripts.families.mapping.settings import Settings
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.families.mapping.sources import Compute, Constant, Copy, Sources
from export_scripts.families.mapping.tensors import ShapeTensor, constant, float32, stacked
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Fields, Table, nested

# Static int8 weights (int8_mode 2) from measured ranges of activations, a table {module: {"input":
# max |x|, "output": max |y|}}. Formulas: FasterTransformer, examples/pytorch/gpt/utils/
# huggingface_opt_convert.py. The loader reads the scales as fp32.
_LARGEST = 127.0
_OPT_LAYER = "model.decoder.layers.{layer}."
# FT matrix -> the modules of the source that make it up.
_MODULES = {
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.out_proj",),
    "mlp.dense_h_to_4h": ("fc1",),
    "mlp.dense_4h_to_h": ("fc2",),
}


def _check_ranges(ranges: Table, num_layer: int) -> None:
    """Refuse ranges that are missing, not positive or not finite; all are named."""
    modules = [name for parts in _MODULES.values() for name in parts]
    problems = []
    for layer, module, side in itertools.product(range(num_layer), modules, ("input", "output")):
        key = _OPT_LAYER.format(layer=layer) + module
        value = nested(ranges, key, side)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            problems.append(f"activation ranges: {key} has {side} = {value!r}")
    refuse(problems)


def _int8_weights(ranges: Table, config: GPTConfig) -> Sources:
    """Return the sources of each layer's int8 weights and scales."""
    parts = {f"{LAYER}{name}": modules for name, modules in _MODULES.items()}
    return {
        tensor.name: Compute(
            functools.partial(
                _int8_values,
                kind,
                tensor.shape,
                [ranges[_OPT_LAYER.format(**index) + module] for module in parts[matrix]],
            ),
            tuple(f"{_OPT_LAYER}{module}.weight" for module in parts[matrix]),
        )
        for spec in LAYOUT
        if "int8" in spec.when
        for matrix, _, kind in [spec.name.removesuffix(".int8").rpartition(".")]
        for index, tensor in spec.expand(config)
    }


def _int8_values(kind: str, shape: Any, entries: Any, config: GPTConfig, *weights: Any) -> Any:
    """Return the int8 weights or the fp32 scales of a matrix; QKV has three parts.

    Weights are round(w * 127 / max |w|) (in[, parts], out), with the maximum of each part. A scale
    is a number for each part; the scale between, output / (input * weight), is a number for each of
    QKV's local columns.
    """
    if isinstance(weights[0], ShapeTensor):  # shapes are checked with the matrix itself
        return ShapeTensor(shape)
    inputs = _scales(entries, "input")
    if kind == "scale":
        return constant(inputs)
    if kind == "scale_out":
        return constant([entry["output"] / _LARGEST for entry in entries])
    scales = [_weight_scale(weight) for weight in weights]
    if kind == "weight":
        parts = [
            (float32(weight).T * scale).round()
            for weight, scale in zip(weights, scales, strict=True)
        ]
        return parts[0] if len(parts) == 1 else stacked(parts, 1)
    between = zip(_scales(entries, "output"), inputs, scales, strict=True)
    values = constant([after / (before * scale) for after, before, scale in between])
    return values if len(weights) == 1 else values[:, None].repeat(config.local_hidden, 1)


def _weight_scale(weight: Any) -> float:
    """Return 127 / max |w|, computed in fp32."""
    largest = abs(float32(weight)).max()
    if largest == 0:
        raise CheckpointMismatchError("weights that are all zero have no int8 scale")
    return float(constant([_LARGEST])[0] / largest)


def _scales(entries: Any, side: str) -> list[float]:
    """Return 127 / range of each module, computed in fp32 for the parts of QKV.

    NVIDIA's converter has these in an fp32 array, the others as Python numbers.
    """
    if len(entries) == 1:
        return [_LARGEST / entry[side] for entry in entries]
    quotients = constant([_LARGEST]) / constant([entry[side] for entry in entries])
    return [float(value) for value in quotients]


# The table of positions begins with two unused rows.
_POSITION_OFFSET = 2

_PROJECT_IN = "model.decoder.project_in.weight"
_PROJECT_OUT = "model.decoder.project_out.weight"


def _read_opt(settings: Settings, _: Any) -> Fields:
    norm_before = settings.flag("do_layer_norm_before", default=True)
    removed = settings.flag("_remove_final_layer_norm", default=False)
    return {
        "layernorm_type": "pre_layernorm" if norm_before else "post_layernorm",
        "has_post_decoder_layernorm": norm_before and not removed,
    }


def _written_opt(config: GPTConfig) -> Fields:
    norm_before = config.layernorm_type == "pre_layernorm"
    return {
        "word_embed_proj_dim": config.hidden,
        "do_layer_norm_before": norm_before,
        "_remove_final_layer_norm": norm_before and not config.has_post_decoder_layernorm,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    }


def _widened(_: GPTConfig, table: Any, project: Any) -> Any:
    """Return the table (V, hidden) from a narrower one (V, w) and a projection (w, hidden)."""
    return float32(table) @ float32(project)


def _neutral(facts: Facts) -> Sources:
    """Return constants for the biases and norm parameters that a model does not store."""
    bias = facts.config.get("enable_bias", True)
    affine = facts.config.get("layer_norm_elementwise_affine", True)
    return {
        spec.name: Constant(spec.shape, float(spec.name.endswith(".weight")))
        for spec in LAYOUT
        if not (affine if "layernorm" in spec.name else bias or not spec.name.endswith(".bias"))
    }


def opt_sources(facts: Facts, config: GPTConfig, table: Sources) -> Sources:
    """Return the sources that names do not describe; opt-350m has narrow tables and projections."""
    found = {
        **_neutral(facts),
        "model.wpe": Copy("model.decoder.embed_positions.weight", skip=_POSITION_OFFSET),
    }
    (embedding, _), (head, _) = (table[name].reads[0] for name in ("model.wte", HEAD))
    if facts.has(_PROJECT_IN):
        found["model.wte"] = Compute(
            lambda config, table, project: _widened(config, table, project.T),
            (embedding, _PROJECT_IN),
        )
    if facts.has(_PROJECT_OUT):
        found[HEAD] = Compute(_widened, (head, _PROJECT_OUT))
    if facts.activation_ranges is not None:
        _check_ranges(facts.activation_ranges, config.num_layer)
        found |= _int8_weights(facts.activation_ranges, config)
    return found


OPT = Trait(_read_opt, _written_opt)
