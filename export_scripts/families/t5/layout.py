"""The T5 layout: T5, T5-v1.1, flan, mT5, UL2 and Megatron T5, whole or the encoder alone.

Layout: FasterTransformer, models/t5/T5EncoderWeight.cc, T5DecodingWeight.cc and their layer
weights (5.3 line). Encoder and decoder layers are numbered separately.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from export_scripts.families.layout.spec import ModelFamily, WeightSpec, When
from export_scripts.families.t5.config import (
    FT_MAX_DISTANCE,
    FT_NORM_EPS,
    HEAD,
    T5Config,
    t5_architecture,
)

ENCODER = "encoder.block.{encoder_layer}."
DECODER = "decoder.block.{decoder_layer}."
# Config fields that must be true for a tensor to exist; joined with +.
_BIAS = ("t5_with_bias",)
_DECODER = ("num_decoder_layers",)
_RELATIVE = ("is_relative",)
_GATED = ("use_gated_activation",)
_ADAPTERS = ("adapter_inter_size",)
_IA3 = ("ia3_num_tasks",)

RELATIVE_BIAS = "{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _norm(name: str, when: When = ()) -> tuple[WeightSpec, ...]:
    return WeightSpec.norm(name, "d_model", when=when, bias=_BIAS)


def _column(name: str, width: str, when: When = ()) -> tuple[WeightSpec, ...]:
    return WeightSpec.column(name, "d_model", width, when=when, bias=_BIAS)


def _ia3(name: str, width: str) -> WeightSpec:
    return WeightSpec(f"{name}.ia3.weight", ("ia3_num_tasks", width), split=1, when=_IA3)


def _attention(name: str) -> tuple[WeightSpec, ...]:
    """Return three separate projections, as in the encoder and in cross attention."""
    return (
        *_column(f"{name}.q", "inner"),
        *_column(f"{name}.k", "inner"),
        *_column(f"{name}.v", "inner"),
        *WeightSpec.row(f"{name}.o", "inner", "d_model", bias=_BIAS),
        _ia3(f"{name}.k", "inner"),
        _ia3(f"{name}.v", "inner"),
    )


def _mlp(name: str) -> tuple[WeightSpec, ...]:
    """Return the MLP; in a gated one, wi is the activated half and wi2 the linear half."""
    return (
        *_column(f"{name}.wi", "d_ff"),
        *_column(f"{name}.wi2", "d_ff", _GATED),
        *WeightSpec.row(f"{name}.wo", "d_ff", "d_model", bias=_BIAS),
        _ia3(name, "d_ff"),
    )


def _adapters(block: str) -> tuple[WeightSpec, ...]:
    width = "adapter_inter_size"
    specs: list[WeightSpec] = []
    for place in ("after_attention_adapter", "after_ffn_adapter"):
        mlp = f"{block}{place}.DenseSiluDense"
        specs += [
            *WeightSpec.norm(f"{block}{place}.layer_norm", "d_model", when=_ADAPTERS),
            WeightSpec(f"{mlp}.wi.weight", ("d_model", width), split=1, when=_ADAPTERS),
            WeightSpec(f"{mlp}.wo.weight", (width, "d_model"), split=0, when=_ADAPTERS),
        ]
    return tuple(specs)


def _relative_bias(side: str, when: When) -> WeightSpec:
    name = RELATIVE_BIAS.format(side=side)
    return WeightSpec(name, ("num_heads", "positions"), split=0, when=when)


_SELF = DECODER + "layer.0.SelfAttention"

LAYOUT: tuple[WeightSpec, ...] = (
    WeightSpec("shared.weight_T", ("vocab_size", "d_model")),
    WeightSpec("shared.ape", ("positions", "d_model"), when=("is_absolute",)),
    _relative_bias("encoder", _RELATIVE),
    *_norm(ENCODER + "layer.0.layer_norm"),
    *_attention(ENCODER + "layer.0.SelfAttention"),
    *_norm(ENCODER + "layer.1.layer_norm"),
    *_mlp(ENCODER + "layer.1.DenseReluDense"),
    *_adapters(ENCODER),
    *_norm("encoder.final_layer_norm"),
    _relative_bias("decoder", _RELATIVE + _DECODER),
    *_norm(DECODER + "layer.0.layer_norm"),
    WeightSpec(f"{_SELF}.qkv.weight", ("d_model", 3, "inner"), split=2),
    WeightSpec(f"{_SELF}.qkv.bias", (3, "inner"), split=1, when=_BIAS),
    *WeightSpec.row(f"{_SELF}.o", "inner", "d_model", bias=_BIAS),
    _ia3(f"{_SELF}.k", "inner"),
    _ia3(f"{_SELF}.v", "inner"),
    *_norm(DECODER + "layer.1.layer_norm"),
    *_attention(DECODER + "layer.1.EncDecAttention"),
    *_norm(DECODER + "layer.2.layer_norm"),
    *_mlp(DECODER + "layer.2.DenseReluDense"),
    *_adapters(DECODER),
    *_norm("decoder.final_layer_norm", _DECODER),
    WeightSpec(HEAD, ("vocab_size", "d_model"), when=("has_lm_head", *_DECODER)),
    WeightSpec("shared.bias", ("vocab_size",), when=_BIAS + _DECODER),
    WeightSpec("model.prompt_table.{task}.weight", ("prompt_length", "d_model")),
)


def _ft_limits(config: T5Config) -> list[str]:
    distance = config.relative_attention_max_distance
    if config.is_relative and distance != FT_MAX_DISTANCE:
        return [
            f"relative_attention_max_distance = {distance}, but FasterTransformer always takes "
            f"{FT_MAX_DISTANCE}"
        ]
    return []


T5 = ModelFamily(
    name="t5",
    model_type="T5",
    config=T5Config,
    architecture=t5_architecture,
    layout=LAYOUT,
    divisible=("num_heads", "d_ff", "adapter_inter_size"),
    # huggingface_t5_ckpt_convert.py writes this transposed copy of the embedding; no loader reads
    # it.
    unread=("shared.weight.bin",),
    ft_limits=_ft_limits,
    owns=lambda sections: bool(sections.get("decoder")),
)

T5_ENCODER = dataclasses.replace(
    T5,
    name="t5_encoder",
    model_type="T5-Encoder",
    owns=lambda sections: not sections.get("decoder"),
)


def t5_warnings(_: Any, config: T5Config) -> list[str]:
    """Return warnings about a model that converts, with the remedy."""
    warnings = []
    if config.weight_data_type == "fp16":
        warnings.append(
            "T5 and flan-T5 were trained in bf16: in fp16 their activations are known to overflow "
            "(answers of NaN or nonsense); convert with weight_data_type bf16 or fp32 and serve "
            "with data_type bf16 or fp32"
        )
    if config.is_relative and config.relative_attention_max_distance != FT_MAX_DISTANCE:
        warnings.append(
            f"relative_attention_max_distance = {config.relative_attention_max_distance}: NVIDIA's "
            f"FasterTransformer always takes {FT_MAX_DISTANCE}; serve with the pytorch engine"
        )
    if config.layer_norm_epsilon != FT_NORM_EPS:
        warnings.append(
            f"layer_norm_epsilon = {config.layer_norm_epsilon}: NVIDIA's FasterTransformer always "
            f"takes {FT_NORM_EPS}; the pytorch engine takes the model's"
        )
    return warnings
