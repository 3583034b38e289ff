"""The GPT layout from megatron-core checkpoints of NeMo or Megatron-LM, distributed or not.

Names: NVIDIA/Megatron-LM, megatron/core/models/gpt/gpt_model.py and its layer specs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from export_scripts.families.gpt.layout import GPT
from export_scripts.families.gpt.megatron import (
    assumed_tokens_warning,
    gpt_config,
    gpt_sources,
    not_gpt,
    tuned_keys,
)
from export_scripts.families.mapping.megatron_traits import (
    MegatronTraits,
    megatron_traits,
    nemo_traits,
)
from export_scripts.families.mapping.names import QUERY_KEY_VALUE, in_layers
from export_scripts.families.mapping.nemo2_traits import bridge_traits, nemo2_traits, unknown_model
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping

# Format -> reader of its configuration.
_TRAITS = {
    "nemo": nemo_traits,
    "megatron": megatron_traits,
    "nemo2": nemo2_traits,
    "bridge": bridge_traits,
}

CORE_LAYER = "model.decoder.layers.{layer}."
CORE_WTE = "model.embedding.word_embeddings.weight"
# Of Megatron Bridge's Gemma 2 and 3.
_OUTPUT_NORM = "post_layernorm"
CORE_HEAD = "model.output_layer.weight"


def core_names(facts: Facts) -> dict[str, Any]:
    """Return the modules of a layout and of megatron-core, whose norms may be fused.

    Transformer Engine's fused modules keep `layer_norm_weight` and `layer_norm_bias` inside.
    """
    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    fused = facts.has(f"{CORE_LAYER}{qkv}.layer_norm_weight".format(layer=0))
    layer = {
        "input_layernorm": f"{qkv}.layer_norm_" if fused else "input_layernorm",
        **dict.fromkeys(("attention.query_key_value", *QUERY_KEY_VALUE), qkv),
        "attention.query_norm": "self_attention.q_layernorm",
        "attention.key_norm": "self_attention.k_layernorm",
        "attention.dense": "self_attention.linear_proj",
        "attention_output_layernorm": f"self_attention.linear_proj.{_OUTPUT_NORM}",
        "post_attention_layernorm": f"{fc1}.layer_norm_" if fused else "pre_mlp_layernorm",
        "mlp.dense_h_to_4h": fc1,
        **({"mlp.dense_h_to_4h_2": fc1} if core_traits(facts).gated else {}),
        "mlp.dense_4h_to_h": "mlp.linear_fc2",
        "mlp_output_layernorm": f"mlp.linear_fc2.{_OUTPUT_NORM}",
    }
    return {
        "model.wte": "model.embedding.word_embeddings",
        "model.wpe": "model.embedding.position_embeddings",
        "model.final_layernorm": "model.decoder.final_layernorm",
        "model.lm_head": "model.output_layer",
        **in_layers(CORE_LAYER, layer),
    }


def is_core(facts: Facts) -> bool:
    """Return whether a checkpoint has megatron-core's names."""
    return facts.has(CORE_WTE) and facts.has(
        CORE_LAYER.format(layer=0) + "self_attention.linear_qkv.weight"
    )


def core_traits(facts: Facts) -> MegatronTraits:
    """Return the traits of a megatron-core checkpoint, saved by NeMo or by Megatron-LM."""
    traits = _TRAITS[facts.reader.format](facts.config)
    if facts.reader.is_distributed:
        # Layers are numbered over all pipeline stages.
        return dataclasses.replace(traits, virtual_pp=1)
    return traits


def core_is_tied(facts: Facts) -> bool:
    """Return whether the head is the embedding, of which pipeline stages may store a copy."""
    return core_traits(facts).tied and (
        not facts.has(CORE_HEAD) or facts.same_values(CORE_HEAD, CORE_WTE)
    )


def _core_mapping(source_format: str, title: str) -> SourceMapping:
    return SourceMapping(
        name=f"{source_format}-core-gpt",
        title=title,
        family=GPT,
        format=source_format,
        matches=is_core,
        config=lambda facts: gpt_config(
            facts, core_traits(facts), vocab_size=facts.rows(CORE_WTE), tied=core_is_tied(facts)
        ),
        weights=lambda facts, _: gpt_sources(facts, core_traits(facts), core_names(facts)),
        unsupported=lambda facts: (
            not_gpt(core_traits(facts)) + tuned_keys(facts) + unknown_model(facts)
        ),
        ignored=("*._extra_state", "*rotary_pos_emb.inv_freq"),
        copies=lambda _, config: (CORE_HEAD,) if config.tie_word_embeddings else (),
        prefix="model.",
        accepts=("prompt",),
        warnings=assumed_tokens_warning,
    )


GPT_CORE_MAPPINGS: tuple[SourceMapping, ...] = (
    _core_mapping("nemo", "NeMo GPT in megatron-core layout"),
    _core_mapping("megatron", "Megatron-LM GPT in megatron-core layout"),
    _core_mapping("nemo2", "NeMo 2 GPT"),
    _core_mapping("bridge", "Megatron Bridge GPT"),
)
