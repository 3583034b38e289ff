"""The GPT layout from Hugging Face GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT, HEAD, LAYER, GPTConfig
from export_scripts.families.mapping.keys import decoder_values, key, written_decoder
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.settings import head_is_tied, huggingface_settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, Mapped, TensorSource, View, same

WTE = "transformer.wte.weight"
LM_HEAD = "lm_head.weight"


_KEYS = (
    key("head_num", "n_head", "num_attention_heads"),
    key("hidden", "n_embd", "hidden_size"),
    key("inter_size", "n_inner", default=lambda known: 4 * known["hidden"]),
    key("num_layer", "n_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("max_pos_seq_len", "n_positions", "max_position_embeddings"),
    key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
    key("activation_type", "activation_function", kind="activation", default="gelu_new"),
)


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
    config = GPTConfig(
        **decoder_values(facts, settings, _KEYS, name="gpt", bos=50256, eos=50256),
        tie_word_embeddings=head_is_tied(facts, settings, LM_HEAD, WTE, default=True),
    )
    settings.finish()
    return config


def _written(config: GPTConfig, is_tied: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    model = written_decoder("gpt2", "GPT2LMHeadModel", _KEYS, config)
    return [model | {"tie_word_embeddings": config.tie_word_embeddings}]


def _in_thirds(columns: Any, config: GPTConfig) -> Any:
    """Return (in, 3, hidden) of (in, 3 * hidden), or (3, hidden) of a bias."""
    return columns.reshape(*columns.shape[:-1], 3, config.hidden)


def _side_by_side(shape: tuple[int, ...]) -> View:
    return same(shape, stored=(*shape[:-2], shape[-2] * shape[-1]))


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
    **{
        f"{LAYER}attention.query_key_value.{kind}": Mapped(
            f"{_H}attn.c_attn.{kind}", _in_thirds, view=_side_by_side
        )
        for kind in ("weight", "bias")
    },
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
        written=_written,
        weights=lambda *_: WEIGHTS,
        ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks kept as buffers
        copies=lambda _, config: (LM_HEAD,) if config.tie_word_embeddings else (),
        prefix="transformer.",
    )
)
