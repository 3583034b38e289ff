"""Traits of a NeMo 2 decoder, from the configuration of its model.

Key names: NVIDIA/NeMo 2, nemo/collections/llm/gpt/model/base.py; megatron-core,
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.mapping.megatron_traits import MegatronTraits, refuse_mistyped

# Models that compute only what their configuration states; others add, for example, a scaled
# embedding.
KNOWN_MODELS = ("GPTModel", "LlamaModel", "MistralModel", "NemotronModel", "Qwen2Model",
                "Starcoder2Model", "StarcoderModel")  # fmt: skip

# Activation functions by name -> kind; only torch's own gelu is by erf.
_ACTIVATIONS = {
    "gelu": "gelu",
    "fast_gelu": "gelu",
    "openai_gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def nemo2_traits(config: Mapping[str, Any]) -> MegatronTraits:
    """Return the traits of a NeMo 2 model's configuration.

    Raises:
        CheckpointMismatchError: A size is malformed.
    """
    refuse_mistyped(config, "context/model.yaml")
    word = _function_name(config.get("activation_func")) or "gelu"
    fused = word == "gelu" and bool(config.get("bias_activation_fusion"))
    centred = "1p" if config.get("layernorm_zero_centered_gamma") else ""
    hidden = config.get("hidden_size")
    return MegatronTraits(
        head_num=config.get("num_attention_heads"),
        hidden=hidden,
        inter_size=config.get("ffn_hidden_size") or (4 * hidden if hidden else None),
        num_layer=config.get("num_layers"),
        max_positions=config.get("seq_length"),
        norm_eps=float(config.get("layernorm_epsilon") or 1e-5),
        position=str(config.get("position_embedding_type") or "learned_absolute"),
        normalization=str(config.get("normalization") or "LayerNorm").lower() + centred,
        activation=_ACTIVATIONS.get(word, word),
        gated=bool(config.get("gated_linear_unit")),
        fused_gelu=fused,
        exact_gelu=word == "gelu" and not fused,
        bias=_flag(config, "add_bias_linear"),
        tied=_flag(config, "share_embeddings_and_output_weights"),
        query_groups=config.get("num_query_groups"),
        kv_channels=config.get("kv_channels"),
        block_type="pre_ln",
        virtual_pp=config.get("virtual_pipeline_model_parallel_size") or 1,
        expert_num=config.get("num_moe_experts") or 1,
        qk_norm=bool(config.get("qk_layernorm")),
        headscale=False,
        normalized_scores=True,
        rotary_base=float(config.get("rotary_base") or 10000),
        rotary_fraction=float(config.get("rotary_percent") or 1.0),
        rotary_interpolation=config.get("seq_len_interpolation_factor"),
        project_size=0,
        # Only configurations that scale positions have a scale_factor.
        source={**config, "use_rope_scaling": config.get("scale_factor") is not None},
    )


def _flag(config: Mapping[str, Any], key: str) -> bool:
    """Return a setting that is on by default."""
    value = config.get(key)
    return True if value is None else bool(value)


def _function_name(value: Any) -> str:
    """Return the last part of the path under which a configuration keeps a function."""
    path = value.get("_target_") if isinstance(value, Mapping) else value
    return str(path or "").rpartition(".")[2]


def unknown_model(config: Mapping[str, Any]) -> list[str]:
    """Return a reason if the computation of a class of models is unknown."""
    name = config.get("model_class")
    if not name or name in KNOWN_MODELS:
        return []
    return [
        f"context/model.yaml is of a {name}, which may compute more than its configuration says; "
        f"known: {', '.join(KNOWN_MODELS)}"
    ]
