"""The GPT layout from Hugging Face BLOOM: ALiBi, and a layernorm before the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.families.gpt.layout import GPT
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder, key
from export_scripts.families.mapping.names import in_layers
from export_scripts.families.mapping.settings import Settings

_POST = "apply_residual_connection_post_layernorm"


def _read(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    post = settings.flag(_POST, default=False)
    return {
        "inter_size": 4 * values["head_num"] * values["size_per_head"],
        "layernorm_type": "post_layernorm" if post else "pre_layernorm",
        "model_variant": "bloom-post" if post else "bloom-pre",
    }


BLOOM_HUGGINGFACE = HuggingFaceDecoder(
    model_type="bloom",
    model="BloomForCausalLM",
    title="BLOOM",
    family=GPT,
    keys=(
        key("head_num", "n_head", "num_attention_heads"),
        key("hidden", "hidden_size", "n_embed", "n_embd"),
        key("num_layer", "n_layer", "num_hidden_layers"),
        key("vocab_size", "vocab_size"),
        key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
    ),
    fixed={
        "has_positional_encoding": False,
        "has_pre_decoder_layernorm": True,
        "use_attention_linear_bias": True,
    },
    names={
        "model.wte": "transformer.word_embeddings",
        "model.pre_decoder_layernorm": "transformer.word_embeddings_layernorm",
        "model.final_layernorm": "transformer.ln_f",
        "model.lm_head": "lm_head",
        **in_layers(
            "transformer.h.{layer}.",
            {
                "input_layernorm": "input_layernorm",
                "attention.query_key_value": "self_attention.query_key_value",
                "attention.dense": "self_attention.dense",
                "post_attention_layernorm": "post_attention_layernorm",
                "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
            },
        ),
    },
    read=_read,
    written=lambda config: {_POST: config.model_variant == "bloom-post"},
    is_tied=True,
    bos=1,
    eos=2,
    prefix="transformer.",
).mapping()
