"""The GPT layout from Hugging Face BLOOM: ALiBi, and a layernorm before the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT, HEAD, LAYER, GPTConfig
from export_scripts.families.mapping.keys import decoder_values, key, written_decoder
from export_scripts.families.mapping.prompts import with_prompts
from export_scripts.families.mapping.settings import head_is_tied, huggingface_settings
from export_scripts.families.mapping.source_mapping import Facts, SourceMapping
from export_scripts.families.mapping.sources import Copy, SplitQKV, TensorSource, Transpose

WTE = "transformer.word_embeddings.weight"
LM_HEAD = "lm_head.weight"


_KEYS = (
    key("head_num", "n_head", "num_attention_heads"),
    key("hidden", "hidden_size", "n_embed", "n_embd"),
    key("num_layer", "n_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
)
_POST = "apply_residual_connection_post_layernorm"


def _config(facts: Facts) -> GPTConfig:
    """Return the GPT config of a BLOOM.

    Raises:
        CheckpointMismatchError: Settings are missing or cannot be represented; all are listed.
    """
    settings = huggingface_settings(facts.config)
    post = settings.flag(_POST, default=False)
    values = decoder_values(facts, settings, _KEYS, name="bloom", bos=1, eos=2)
    config = GPTConfig(
        **values,
        inter_size=4 * values["head_num"] * values["size_per_head"],
        layernorm_type="post_layernorm" if post else "pre_layernorm",
        model_variant="bloom-post" if post else "bloom-pre",
        has_positional_encoding=False,
        has_pre_decoder_layernorm=True,
        use_attention_linear_bias=True,
        tie_word_embeddings=head_is_tied(facts, settings, LM_HEAD, WTE, default=True),
    )
    settings.finish()
    return config


def _written(config: GPTConfig, is_tied: bool) -> list[dict[str, Any]]:  # noqa: ARG001
    return [
        written_decoder("bloom", "BloomForCausalLM", _KEYS, config)
        | {
            _POST: config.model_variant == "bloom-post",
            "tie_word_embeddings": config.tie_word_embeddings,
        }
    ]


_H = "transformer.h.{layer}."
_QKV = "self_attention.query_key_value."
_COPIED = {
    "model.pre_decoder_layernorm": "transformer.word_embeddings_layernorm",
    LAYER + "input_layernorm": _H + "input_layernorm",
    LAYER + "post_attention_layernorm": _H + "post_attention_layernorm",
    "model.final_layernorm": "transformer.ln_f",
}
_LINEAR = {
    "attention.dense": "self_attention.dense",
    "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
}

WEIGHTS: Mapping[str, TensorSource] = {
    "model.wte": Copy(WTE),
    **{
        f"{ours}.{kind}": Copy(f"{theirs}.{kind}")
        for ours, theirs in _COPIED.items()
        for kind in ("weight", "bias")
    },
    LAYER + "attention.query_key_value.weight": SplitQKV(_H + _QKV + "weight"),
    LAYER + "attention.query_key_value.bias": SplitQKV(_H + _QKV + "bias"),
    **{f"{LAYER}{o}.weight": Transpose(f"{_H}{t}.weight") for o, t in _LINEAR.items()},
    **{f"{LAYER}{o}.bias": Copy(f"{_H}{t}.bias") for o, t in _LINEAR.items()},
    HEAD: Copy(LM_HEAD),
}

BLOOM_HUGGINGFACE = with_prompts(
    SourceMapping(
        name="huggingface-bloom",
        title="Hugging Face BLOOM",
        family=GPT,
        format="huggingface",
        matches=lambda facts: facts.config.get("model_type") == "bloom",
        config=_config,
        written=_written,
        weights=lambda *_: WEIGHTS,
        copies=lambda _, config: (LM_HEAD,) if config.tie_word_embeddings else (),
        prefix="transformer.",
    )
)
