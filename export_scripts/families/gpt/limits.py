"""Megatron features that FT's GPT layout cannot represent."""

from __future__ import annotations

from export_scripts.families.mapping.megatron_traits import MegatronTraits, foreign_settings


def not_gpt(traits: MegatronTraits) -> list[str]:
    """Return every reason the FT GPT layout cannot hold a model."""
    word = traits.source.get("activation")
    width = traits.size_per_head * traits.head_num
    checks = (
        (
            traits.position != "learned_absolute",
            f"position_embedding_type = {traits.position}: FT's GPT has only learned_absolute",
        ),
        (
            traits.normalization not in ("layernorm", "layernorm1p"),
            f"normalization = {traits.normalization}: FT's GPT has only layernorm",
        ),
        (traits.gated, f"activation = {word or 'swiglu'}: FT's GPT has no gated activation"),
        (
            not traits.gated and traits.activation not in ("gelu", "relu", "silu"),
            f"activation = {word or traits.activation}: FT's GPT has gelu, relu and silu",
        ),
        (
            traits.query_groups != traits.head_num,
            f"num_query_groups = {traits.query_groups}: FT's GPT has one key/value head per head",
        ),
        (traits.expert_num > 1, f"{traits.expert_num} experts: FT's GPT has no mixture of experts"),
        (
            bool(traits.source.get("window_size")),
            "window_size: FT's GPT attends to all positions",
        ),
        (
            traits.head_num > 0 and width != traits.hidden,
            f"{traits.head_num} heads of {traits.size_per_head} do not make hidden_size = "
            f"{traits.hidden}: FT's GPT needs kv_channels x num_attention_heads = hidden_size",
        ),
    )
    reasons = [text for applies, text in checks if applies]
    return reasons + foreign_settings(traits, held=("window_size",))
