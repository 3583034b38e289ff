"""The GPT layout from Hugging Face GPT-2."""

from __future__ import annotations

from export_scripts.families.gpt.layout import GPT
from export_scripts.families.mapping.huggingface import HuggingFaceDecoder, key
from export_scripts.families.mapping.names import in_layers

GPT2_SIZES = (
    key("head_num", "n_head", "num_attention_heads"),
    key("hidden", "n_embd", "hidden_size"),
    key("inter_size", "n_inner", default=lambda known: 4 * known["hidden"]),
    key("num_layer", "n_layer", "num_hidden_layers"),
    key("vocab_size", "vocab_size"),
    key("layernorm_eps", "layer_norm_epsilon", kind="number", default=1e-5),
)

GPT2_HUGGINGFACE = HuggingFaceDecoder(
    model_type="gpt2",
    model="GPT2LMHeadModel",
    title="GPT-2",
    name="gpt",
    family=GPT,
    keys=(
        *GPT2_SIZES,
        key("max_pos_seq_len", "n_positions", "max_position_embeddings"),
        key("activation_type", "activation_function", kind="activation", default="gelu_new"),
    ),
    names={
        "model.wte": "transformer.wte",
        "model.wpe": "transformer.wpe",
        "model.final_layernorm": "transformer.ln_f",
        "model.lm_head": "lm_head",
        **in_layers(
            "transformer.h.{layer}.",
            {
                "input_layernorm": "ln_1",
                "attention.query_key_value": "attn.c_attn",
                "attention.dense": "attn.c_proj",
                "post_attention_layernorm": "ln_2",
                "mlp.dense_h_to_4h": "mlp.c_fc",
                "mlp.dense_4h_to_h": "mlp.c_proj",
            },
        ),
    },
    in_out=True,  # matrices are Conv1D's
    expected={
        "scale_attn_weights": ((True,), "FT scales attention scores"),
        "scale_attn_by_inverse_layer_idx": ((False,), "FT scales every layer's scores alike"),
    },
    is_tied=True,
    bos=50256,
    eos=50256,
    ignored=("*.attn.bias", "*.attn.masked_bias"),  # masks kept as buffers
    prefix="transformer.",
).mapping()
