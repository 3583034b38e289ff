"""The T5 layout: T5, T5-v1.1, flan, mT5, UL2 and Megatron T5, whole or the encoder alone.

Layout: FasterTransformer, models/t5/T5EncoderWeight.cc, T5DecodingWeight.cc and their layer
weights (5.3 line). Encoder and decoder layers are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from export_scripts.families.spec import ModelFamily, Sections, WeightSpec, always
from export_scripts.families.t5_config import (
    FT_MAX_DISTANCE,
    HEAD,
    T5Config,
    t5_architecture,
)

ENCODER = "encoder.block.{encoder_layer}."
DECODER = "decoder.block.{decoder_layer}."
RELATIVE_BIAS = "{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def _has_bias(config: T5Config) -> bool:
    return config.t5_with_bias


def _has_decoder(config: T5Config) -> bool:
    return not config.is_encoder_only


def _has_head(config: T5Config) -> bool:
    return config.has_lm_head and not config.is_encoder_only


def _has_head_bias(config: T5Config) -> bool:
    return config.t5_with_bias and not config.is_encoder_only


def _is_relative(config: T5Config) -> bool:
    return config.is_relative


def _is_relative_decoder(config: T5Config) -> bool:
    return config.is_relative and not config.is_encoder_only


def _is_absolute(config: T5Config) -> bool:
    return not config.is_relative


def _is_gated(config: T5Config) -> bool:
    return config.use_gated_activation


def _is_gated_with_bias(config: T5Config) -> bool:
    return config.use_gated_activation and config.t5_with_bias


def _has_adapters(config: T5Config) -> bool:
    return config.adapter_inter_size > 0


def _has_ia3(config: T5Config) -> bool:
    return config.ia3_num_tasks > 0


When = Callable[[Any], bool]


def _norm(name: str, when: When = always, bias_when: When = _has_bias) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{name}.weight", ("d_model",), None, when),
        WeightSpec(f"{name}.bias", ("d_model",), None, bias_when),
    )


def _column(
    name: str, width: str, *, when: When = always, bias_when: When = _has_bias
) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{name}.weight", ("d_model", width), 1, when),
        WeightSpec(f"{name}.bias", (width,), 0, bias_when),
    )


def _row(name: str, width: str) -> tuple[WeightSpec, ...]:
    return (
        WeightSpec(f"{name}.weight", (width, "d_model"), 0),
        WeightSpec(f"{name}.bias", ("d_model",), None, _has_bias),
    )


def _ia3(name: str, width: str) -> WeightSpec:
    return WeightSpec(f"{name}.ia3.weight", ("ia3_num_tasks", width), 1, _has_ia3)


def _attention(name: str) -> tuple[WeightSpec, ...]:
    """Three separate projections, as in the encoder and in cross attention."""
    return (
        *_column(f"{name}.q", "inner"),
        *_column(f"{name}.k", "inner"),
        *_column(f"{name}.v", "inner"),
        *_row(f"{name}.o", "inner"),
        _ia3(f"{name}.k", "inner"),
        _ia3(f"{name}.v", "inner"),
    )


def _mlp(name: str) -> tuple[WeightSpec, ...]:
    """The MLP; of a gated one wi is the activated half and wi2 the linear half."""
    return (
        *_column(f"{name}.wi", "d_ff"),
        *_column(f"{name}.wi2", "d_ff", when=_is_gated, bias_when=_is_gated_with_bias),
        *_row(f"{name}.wo", "d_ff"),
        _ia3(name, "d_ff"),
    )


def _adapters(block: str) -> tuple[WeightSpec, ...]:
    width = "adapter_inter_size"
    specs: list[WeightSpec] = []
    for place in ("after_attention_adapter", "after_ffn_adapter"):
        specs += [
            *_norm(f"{block}{place}.layer_norm", _has_adapters, _has_adapters),
            WeightSpec(
                f"{block}{place}.DenseSiluDense.wi.weight", ("d_model", width), 1, _has_adapters
            ),
            WeightSpec(
                f"{block}{place}.DenseSiluDense.wo.weight", (width, "d_model"), 0, _has_adapters
            ),
        ]
    return tuple(specs)


def _relative_bias(side: str, when: When) -> WeightSpec:
    return WeightSpec(RELATIVE_BIAS.format(side=side), ("num_heads", "positions"), 0, when)


_SELF = DECODER + "layer.0.SelfAttention"

LAYOUT: tuple[WeightSpec, ...] = (
    WeightSpec("shared.weight_T", ("vocab_size", "d_model")),
    WeightSpec("shared.ape", ("positions", "d_model"), None, _is_absolute),
    _relative_bias("encoder", _is_relative),
    *_norm(ENCODER + "layer.0.layer_norm"),
    *_attention(ENCODER + "layer.0.SelfAttention"),
    *_norm(ENCODER + "layer.1.layer_norm"),
    *_mlp(ENCODER + "layer.1.DenseReluDense"),
    *_adapters(ENCODER),
    *_norm("encoder.final_layer_norm"),
    _relative_bias("decoder", _is_relative_decoder),
    *_norm(DECODER + "layer.0.layer_norm"),
    WeightSpec(f"{_SELF}.qkv.weight", ("d_model", 3, "inner"), 2),
    WeightSpec(f"{_SELF}.qkv.bias", (3, "inner"), 1, _has_bias),
    *_row(f"{_SELF}.o", "inner"),
    _ia3(f"{_SELF}.k", "inner"),
    _ia3(f"{_SELF}.v", "inner"),
    *_norm(DECODER + "layer.1.layer_norm"),
    *_attention(DECODER + "layer.1.EncDecAttention"),
    *_norm(DECODER + "layer.2.layer_norm"),
    *_mlp(DECODER + "layer.2.DenseReluDense"),
    *_adapters(DECODER),
    *_norm("decoder.final_layer_norm", _has_decoder, _has_head_bias),
    WeightSpec(HEAD, ("vocab_size", "d_model"), None, _has_head),
    WeightSpec("shared.bias", ("vocab_size",), None, _has_head_bias),
    WeightSpec("model.prompt_table.{task}.weight", ("prompt_length", "d_model")),
)


def _owns_t5(sections: Sections) -> bool:
    return bool(sections.get("decoder"))


def _owns_encoder(sections: Sections) -> bool:
    return not sections.get("decoder")


def _ft_limits(config: T5Config) -> list[str]:
    distance = config.relative_attention_max_distance
    if config.is_relative and distance != FT_MAX_DISTANCE:
        return [
            f"relative_attention_max_distance = {distance}, but FasterTransformer always takes "
            f"{FT_MAX_DISTANCE}"
        ]
    return []


_DIVISIBLE = ("num_heads", "d_ff", "adapter_inter_size")
# huggingface_t5_ckpt_convert.py writes this transposed copy of the embedding; no loader reads it.
_UNREAD = ("shared.weight.bin",)

T5 = ModelFamily(
    name="t5",
    model_type="T5",
    config=T5Config,
    architecture=t5_architecture,
    layout=LAYOUT,
    divisible=_DIVISIBLE,
    unread=_UNREAD,
    ft_limits=_ft_limits,
    owns=_owns_t5,
)

T5_ENCODER = ModelFamily(
    name="t5_encoder",
    model_type="T5-Encoder",
    config=T5Config,
    architecture=t5_architecture,
    layout=LAYOUT,
    divisible=_DIVISIBLE,
    unread=_UNREAD,
    ft_limits=_ft_limits,
    owns=_owns_encoder,
)
