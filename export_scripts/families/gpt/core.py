"""The GPT layout from megatron-core checkpoints of NeMo or Megatron-LM, distributed or not.

Names: NVIDIA/Megatron-LM, megatron/core/models/gpt/gpt_model.py and its layer specs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from export_scripts.families.gpt.layout import GPT, HEAD, LAYER, GPTConfig
from export_scripts.families.gpt.limits import not_gpt
from export_scripts.families.gpt.megatron import (
    assumed_tokens_warning,
    gpt_config,
    linear_sources,
    norm_sources,
    tuned_keys,
    with_bias_and_norm,
)
from export_scripts.families.mapping.megatron_traits import (
    MegatronTraits,
    megatron_traits,
    nemo_traits,
)
from export_scripts.families.mapping.nemo2_traits import bridge_traits, nemo2_traits, unknown_model
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, SplitQKV, TensorSource

# Format -> reader of its configuration.
_TRAITS = {
    "nemo": nemo_traits,
    "megatron": megatron_traits,
    "nemo2": nemo2_traits,
    "bridge": bridge_traits,
}

_CORE = "model."
_CORE_LAYER = _CORE + "decoder.layers.{layer}."
CORE_WTE = _CORE + "embedding.word_embeddings.weight"
CORE_HEAD = _CORE + "output_layer.weight"


def core_norm_keys(facts: Facts) -> dict[str, str]:
    """Return the keys of a layer's two norms: separate, or fused into the following linear.

    Transformer Engine's fused modules keep `layer_norm_weight` and `layer_norm_bias` inside.
    """
    fused = facts.has(_CORE_LAYER.format(layer=0) + "self_attention.linear_qkv.layer_norm_weight")
    if fused:
        return {
            "input_layernorm": _CORE_LAYER + "self_attention.linear_qkv.layer_norm_",
            "post_attention_layernorm": _CORE_LAYER + "mlp.linear_fc1.layer_norm_",
        }
    return {
        "input_layernorm": _CORE_LAYER + "input_layernorm.",
        "post_attention_layernorm": _CORE_LAYER + "pre_mlp_layernorm.",
    }


def is_core(facts: Facts) -> bool:
    """Return whether a checkpoint has megatron-core's names."""
    return facts.has(CORE_WTE) and facts.has(
        _CORE_LAYER.format(layer=0) + "self_attention.linear_qkv.weight"
    )


def core_traits(facts: Facts) -> MegatronTraits:
    """Return the traits of a megatron-core checkpoint, saved by NeMo or by Megatron-LM."""
    traits = _TRAITS[facts.reader.format](facts.config)
    if facts.reader.is_distributed:
        # Layers are numbered over all pipeline stages.
        return dataclasses.replace(traits, virtual_pp=1)
    return traits


def _core_reasons(facts: Facts) -> list[str]:
    return not_gpt(core_traits(facts)) + tuned_keys(facts) + unknown_model(facts)


def core_is_tied(facts: Facts) -> bool:
    """Return whether the head is the embedding, of which pipeline stages may store a copy."""
    return core_traits(facts).tied and (
        not facts.has(CORE_HEAD) or facts.same_values(CORE_HEAD, CORE_WTE)
    )


def _core_config(facts: Facts) -> GPTConfig:
    rows = facts.rows(CORE_WTE)
    return gpt_config(facts, core_traits(facts), vocab_size=rows, tied=core_is_tied(facts))


def _core_weights(facts: Facts, config: GPTConfig) -> Mapping[str, TensorSource]:  # noqa: ARG001
    qkv = _CORE_LAYER + "self_attention.linear_qkv"
    table: dict[str, TensorSource] = {
        "model.wte": Copy(CORE_WTE, cut=0),
        "model.wpe": Copy(_CORE + "embedding.position_embeddings.weight"),
        LAYER + "attention.query_key_value.weight": SplitQKV(f"{qkv}.weight"),
        LAYER + "attention.query_key_value.bias": SplitQKV(f"{qkv}.bias"),
        **linear_sources(
            LAYER + "attention.dense", _CORE_LAYER + "self_attention.linear_proj", row_split=True
        ),
        **linear_sources(
            LAYER + "mlp.dense_h_to_4h", _CORE_LAYER + "mlp.linear_fc1", row_split=False
        ),
        **linear_sources(
            LAYER + "mlp.dense_4h_to_h", _CORE_LAYER + "mlp.linear_fc2", row_split=True
        ),
        **norm_sources("model.final_layernorm", _CORE + "decoder.final_layernorm"),
        HEAD: Copy(CORE_HEAD, cut=0),
    }
    for target, source in core_norm_keys(facts).items():
        for part in ("weight", "bias"):
            table[f"{LAYER}{target}.{part}"] = Copy(f"{source}{part}")
    return with_bias_and_norm(table, core_traits(facts), facts)


def _core_mapping(source_format: str, title: str) -> SourceMapping:
    return SourceMapping(
        name=f"{source_format}-core-gpt",
        title=title,
        family=GPT,
        format=source_format,
        matches=is_core,
        config=_core_config,
        weights=_core_weights,
        unsupported=_core_reasons,
        ignored=("*._extra_state", "*.rotary_pos_emb.inv_freq"),
        copies=lambda _, config: (CORE_HEAD,) if config.tie_word_embeddings else (),
        prefix=_CORE,
        accepts=("prompt",),
        warnings=assumed_tokens_warning,
    )


GPT_CORE_MAPPINGS: tuple[SourceMapping, ...] = (
    _core_mapping("nemo", "NeMo GPT in megatron-core layout"),
    _core_mapping("megatron", "Megatron-LM GPT in megatron-core layout"),
    _core_mapping("nemo2", "NeMo 2 GPT"),
    _core_mapping("bridge", "Megatron Bridge GPT"),
)
