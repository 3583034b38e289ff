"""The GPT layout from Hugging Face GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT, HEAD, LAYER, GPTConfig
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.settings import head_is_tied, huggingface_settings, model_name
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Mapped, TensorSource

WTE = "transformer.wte.weight"
LM_HEAD = "lm_head.weight"


def _config(facts: Facts) -> GPTConfig:
    """Return the GPT config of a GPT-2.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    settings.expect("scale_attn_weights", True, why="FT scales attention scores")
    settings.expect(
        "scale_attn_by_inverse_layer_idx", False, why="FT scales every layer's scores alike"
    )
    hidden = settings.integer("n_embd", "hidden_size")
    heads = settings.integer("n_head", "num_attention_heads")
    activation, exact_gelu = settings.activation("activation_function", default="gelu_new")
    start_id, end_id = settings.token_ids(facts, bos=50256, eos=50256)
    config = GPTConfig(
        model_name=model_name(facts.config, "gpt"),
        head_num=heads,
        size_per_head=settings.divide(hidden, heads, "n_embd by n_head"),
        inter_size=settings.integer("n_inner", default=4 * hidden),
        num_layer=settings.integer("n_layer", "num_hidden_layers"),
        vocab_size=settings.integer("vocab_size"),
        max_pos_seq_len=settings.integer("n_positions", "max_position_embeddings"),
        start_id=start_id,
        end_id=end_id,
        layernorm_eps=settings.number("layer_norm_epsilon", default=1e-5),
        activation_type=activation,
        exact_gelu=exact_gelu,
        tie_word_embeddings=head_is_tied(facts, settings, LM_HEAD, WTE, default=True),
        weight_data_type=facts.weight_data_type,
        tensor_para_size=facts.tp_size,
    )
    settings.finish()
    return config


def _in_thirds(columns: Any, config: GPTConfig) -> Any:
    """Return (in, 3, hidden) of (in, 3 * hidden), or (3, hidden) of a bias."""
    return columns.reshape(*columns.shape[:-1], 3, config.hidden)


_H = "transformer.h.{layer}."
_NAMES = {
    "input_layernorm": "ln_1",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}

# Conv1D stores (in, out), as FT does.
WEIGHTS: Mapping[str, TensorSource] = {
    "model.wte": Copy(WTE),
    "model.wpe": Copy("transformer.wpe.weight"),
    LAYER + "attention.query_key_value.weight": Mapped(_H + "attn.c_attn.weight", _in_thirds),
    LAYER + "attention.query_key_value.bias": Mapped(_H + "attn.c_attn.bias", _in_thirds),
    **{
        f"{LAYER}{ours}.{kind}": Copy(f"{_H}{theirs}.{kind}")
        for ours, theirs in _NAMES.items()
        for kind in ("weight", "bias")
    },
    "model.final_layernorm.weight": Copy("transformer.ln_f.weight"),
    "model.final_layernorm.bias": Copy("transformer.ln_f.bias"),
    HEAD: Copy(LM_HEAD),
}

GPT2_HUGGINGFACE = with_prompts(
    SourceMapping(
        name="huggingface-gpt2",
        title="Hugging Face GPT-2",
        family=GPT,
        format="huggingface",
        matches=lambda facts: facts.config.get("model_type") == "gpt2",
        config=_config,
        weights=lambda *_: WEIGHTS,
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks kept as buffers
        copies=lambda _, config: (LM_HEAD,) if config.tie_word_embeddings else (),
        prefix="transformer.",
    )
)
