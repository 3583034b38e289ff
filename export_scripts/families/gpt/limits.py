"""Megatron features that FT's GPT layout cannot represent."""

from __future__ import annotations

from export_scripts.families.mapping.megatron_traits import MegatronTraits, foreign_settings


def not_gpt(traits: MegatronTraits) -> list[str]:
    """Return every reason the FT GPT layout cannot hold a model."""
    reasons = [
        f"{key} = {traits.source.get(key)!r}: a GPT folder needs {key}"
        for key, value in (
            ("num_attention_heads", traits.head_num),
            ("hidden_size", traits.hidden),
            ("num_layers", traits.num_layer),
            ("ffn_hidden_size", traits.inter_size),
        )
        if not isinstance(value, int) or value < 1
    ]
    checks = (
        (
            traits.position != "learned_absolute",
            f"position_embedding_type = {traits.position}: FT's GPT has only learned_absolute",
        ),
        (
            traits.normalization not in ("layernorm", "layernorm1p"),
            f"normalization = {traits.normalization}: FT's GPT has only layernorm",
        ),
        (
            traits.gated,
            f"activation = {traits.source.get('activation', 'swiglu')}: FT's GPT has no gated "
            "activation",
        ),
        (
            not traits.gated and traits.activation not in ("gelu", "relu", "silu"),
            f"activation = {traits.source.get('activation', traits.activation)}: "
            "FT's GPT has gelu, relu and silu",
        ),
        (
            traits.virtual_pp > 1,
            f"virtual_pipeline_model_parallel_size = {traits.virtual_pp}: an interleaved "
            "schedule's layer order is unknown",
        ),
        (
            traits.query_groups not in (None, traits.head_num),
            f"num_query_groups = {traits.query_groups}: FT's GPT has one key/value head per head",
        ),
        (
            bool(traits.source.get("multi_query_attention")),
            "multi_query_attention = true: FT's GPT has one key/value head per head",
        ),
        (traits.qk_norm, "qk_layernorm = true: FT's GPT does not normalise queries and keys"),
        (
            traits.block_type != "pre_ln",
            f"transformer_block_type = {traits.block_type}: only pre_ln is converted",
        ),
        (traits.headscale, "headscale = true: FT's GPT does not scale heads"),
        (
            not traits.normalized_scores,
            "normalize_attention_scores = false: FT's GPT divides scores by sqrt(size_per_head)",
        ),
        (traits.expert_num > 1, f"{traits.expert_num} experts: FT's GPT has no mixture of experts"),
        (bool(traits.source.get("window_size")), "window_size: FT's GPT attends to all positions"),
    )
    reasons += [text for applies, text in checks if applies]
    return reasons + foreign_settings(traits) + _uneven_heads(traits)


def _uneven_heads(traits: MegatronTraits) -> list[str]:
    heads, hidden = traits.head_num, traits.hidden
    width = (traits.size_per_head or 0) * (heads or 0)
    if not isinstance(heads, int) or not isinstance(hidden, int) or width == hidden:
        return []
    return [
        f"{heads} heads of {traits.size_per_head} do not make hidden_size = {hidden}: FT's GPT "
        "needs kv_channels x num_attention_heads = hidden_size"
    ]
