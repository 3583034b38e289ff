"""Random two-layer models of every family transformers can make: one table for all tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

_DECODER = {"vocab_size": 53, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_DECODER, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 56, "max_position_embeddings": 40,
    "tie_word_embeddings": False, "head_dim": 8,
}  # fmt: skip
_APERTUS = {
    "pad_token_id": None, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
_MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7,
    },
}  # fmt: skip
_GEMMA_1 = {**_LLAMA, "tie_word_embeddings": True, "pad_token_id": None}
_GEMMA = {**_GEMMA_1, "sliding_window": 5}
_UNSIZED = {name: value for name, value in _LLAMA.items() if name != "head_dim"}
_FALCON = {
    **_DECODER, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
    "ffn_hidden_size": 56, "max_position_embeddings": 40,
}  # fmt: skip
_GPT2 = {**_DECODER, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 40}
_NEOX = {
    **_DECODER, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 56, "max_position_embeddings": 40,
}  # fmt: skip
_T5 = {
    "vocab_size": 41, "d_model": 20, "d_kv": 6, "d_ff": 28, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 4, "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}  # fmt: skip

# name -> (class of the model, its settings)
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "opt": (
        "OPTForCausalLM",
        {**_DECODER, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2,
         "ffn_dim": 56, "max_position_embeddings": 40, "word_embed_proj_dim": 16,
         "do_layer_norm_before": False},
    ),
    "bloom": ("BloomForCausalLM", {**_DECODER, "hidden_size": 24, "n_head": 4, "n_layer": 2}),
    "gptj": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "gptneox-parallel": ("GPTNeoXForCausalLM", _NEOX),
    "gptneox-sequential": ("GPTNeoXForCausalLM", {**_NEOX, "use_parallel_residual": False}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "granite": (
        "GraniteForCausalLM",
        {**_LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "attention_multiplier": 0.3, "logits_scaling": 13.0},
    ),
    "granite_4": (
        "GraniteMoeHybridForCausalLM",
        {**_UNSIZED, "shared_intermediate_size": 56, "num_local_experts": 0, "mamba_n_heads": 1,
         "num_experts_per_tok": 0, "layer_types": ["attention", "attention"],
         "position_embedding_type": "rope", "embedding_multiplier": 12.0,
         "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 13.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", {**_LLAMA, "pad_token_id": None}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {**_LLAMA, "num_hidden_layers": 4, "no_rope_layer_interval": 2, "attention_bias": True,
         "pad_token_id": 0, "eos_token_id": 128001},
    ),
    "phi3": (
        "Phi3ForCausalLM",
        {**_UNSIZED, "pad_token_id": None,
         "original_max_position_embeddings": 8,
         "rope_parameters": {
             "rope_type": "longrope", "partial_rotary_factor": 0.75,
             "short_factor": [1.0, 1.25], "long_factor": [1.5, 4.0],  # of 4 dimensions of 6
         }},
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**_UNSIZED, "sliding_window": 5, "tie_word_embeddings": True},
    ),
    "nemotron": ("NemotronForCausalLM", {**_LLAMA, "attention_bias": True}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {**_DECODER, "hidden_size": 24, "num_heads": 4, "num_layers": 2, "window_size": 5,
         "max_position_embeddings": 40, "attention_types": [[["global", "local"], 1]]},
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT2),
    "phi": ("PhiForCausalLM", {**_UNSIZED, "partial_rotary_factor": 0.75}),
    "stablelm": (
        "StableLmForCausalLM",
        {**_UNSIZED, "qk_layernorm": True, "partial_rotary_factor": 0.75},
    ),
    "cohere": (
        "CohereForCausalLM",
        {**_UNSIZED, "use_qk_norm": True, "logit_scale": 0.3, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {**_UNSIZED, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "falcon": ("FalconForCausalLM", _FALCON),
    "falcon-bias": (
        "FalconForCausalLM",
        {**_FALCON, "bias": True, "multi_query": False, "tie_word_embeddings": False},
    ),
    "falcon-new": (
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-one-norm": (
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2,
         "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "FalconForCausalLM", {**_FALCON, "parallel_attn": False, "multi_query": False},
    ),
    "gemma": ("GemmaForCausalLM", {**_GEMMA_1, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "query_pre_attn_scalar": 11}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_GEMMA, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "seed-oss": ("SeedOssForCausalLM", {**_LLAMA, "pad_token_id": None}),
    "arcee": ("ArceeForCausalLM", _LLAMA),
    "ministral": ("MinistralForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "glm": ("GlmForCausalLM", {**_LLAMA, "pad_token_id": None}),
    "glm4": ("Glm4ForCausalLM", {**_LLAMA, "pad_token_id": None}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {**_UNSIZED, "num_hidden_layers": 4, "sliding_window": 5, "pad_token_id": None},
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", _LLAMA),
    "apertus": ("ApertusForCausalLM", {**_LLAMA, **_APERTUS}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {**_LLAMA, "sliding_window": 9, "pad_token_id": None, **_MINISTRAL3},
    ),
    "exaone3": ("LlamaForCausalLM", {**_LLAMA, "model_type": "exaone", "pad_token_id": None}),
    "internlm3": ("LlamaForCausalLM", {**_LLAMA, "model_type": "internlm3"}),
    "iquestcoder": ("LlamaForCausalLM", {**_LLAMA, "model_type": "iquestcoder"}),
    "cwm": (
        "CwmForCausalLM",
        {**_LLAMA, "num_hidden_layers": 5, "sliding_window": 5, "pad_token_id": None},
    ),
    "helium": ("HeliumForCausalLM", {**_UNSIZED, "head_dim": 6, "pad_token_id": None}),
    "hyperclovax": (
        "HyperCLOVAXForCausalLM",
        {**_LLAMA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
         "logits_scaling": 0.13},
    ),
    "vaultgemma": ("VaultGemmaForCausalLM", {**_GEMMA, "query_pre_attn_scalar": 11}),
    "jais2": ("Jais2ForCausalLM", _LLAMA),
    "mpt": (
        "MptForCausalLM",
        {**_DECODER, "d_model": 24, "n_heads": 6, "n_layers": 2, "max_seq_len": 40},
    ),
    "t5": ("T5ForConditionalGeneration", _T5),
    "mt5": (
        "MT5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-encoder": ("T5EncoderModel", {**_T5, "feed_forward_proj": "gated-silu"}),
    "bert": (
        "BertModel",
        {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 28, "max_position_embeddings": 30},
    ),
}  # fmt: skip

MIXTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**_LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
         "norm_topk_prob": True},
    ),
}  # fmt: skip

# Mixtures that megatron-core does not have, or with sizes of their own: MXFP4 has blocks of 32.
OTHER_MIXTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {**_LLAMA, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3, "pad_token_id": None,
         "moe_intermediate_size": 20, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"vocab_size": 53, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5,
         "num_local_experts": 6, "num_experts_per_tok": 3, "max_position_embeddings": 40,
         "bos_token_id": 1, "eos_token_id": 2,
         "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
             "original_max_position_embeddings": 16,
         }},
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {**_LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": True,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
         "logits_scaling": 13.0},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {**_UNSIZED, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 56, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40,
         "hybrid_override_pattern": "M*-EM-", "ssm_state_size": 5, "mamba_num_heads": 8,
         "mamba_head_dim": 6, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_latent_size": 16,
         "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 2.5,
         "time_step_min": 1e-30},
    ),
}  # fmt: skip


_EXPERTS = {
    **_LLAMA, "num_hidden_layers": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 20,
    "rms_norm_eps": 1e-6, "pad_token_id": None,
}  # fmt: skip
_SIGMOID = {
    **_EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_LATENT = {
    **_SIGMOID, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_shared_experts": 2,
    "head_dim": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# Those with an expert that reads every token, and layers without experts.
SHARED_EXPERTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_UNSIZED, **_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 28,
         "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {**_SIGMOID, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        {**_SIGMOID, "n_group": 4, "topk_group": 2, "attention_bias": True, "sliding_window": 5,
         "max_window_layers": 2},
    ),
    "solar_open": ("SolarOpenForCausalLM", {**_SIGMOID, "n_group": 4, "topk_group": 2}),
    "sarvam_moe": ("Glm4MoeForCausalLM", {**_SIGMOID, "model_type": "sarvam_moe"}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {**_LATENT, "n_group": 4, "topk_group": 2,
         "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "sarvam_mla": ("DeepseekV3ForCausalLM", {**_LATENT, "model_type": "sarvam_mla"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_LATENT, "n_group": 4, "topk_group": 2}),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**_LATENT, "n_group": 4, "topk_group": 4, "topk_method": "greedy",
         "norm_topk_prob": False},
    ),
}  # fmt: skip


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def longrope(pairs: int, **parameters: Any) -> dict[str, Any]:
    """Return factors of so many pairs, the long ones beyond 10 tokens."""
    return {
        "original_max_position_embeddings": 10,
        **rope(
            "longrope", original_max_position_embeddings=10,
            short_factor=[1 + n / 8 for n in range(pairs)],
            long_factor=[2 + n / 2 for n in range(pairs)], **parameters,
        ),
    }  # fmt: skip


_LENGTH = {"original_max_position_embeddings": 16}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}

# Rotary settings that releases of transformers spell differently.
ROTARY: Mapping[str, Mapping[str, Any]] = {
    "llama-longrope": longrope(4),
    "llama-yarn-factor": rope("yarn", factor=2.5, attention_factor=1.3, **_LENGTH),
    "qwen3-longrope": longrope(4),
    "qwen2-yarn": rope("yarn", factor=2.5, **_LENGTH),
    "mistral-dynamic": {**rope("dynamic", factor=3.0), "sliding_window": None},
    "granite-linear": rope("linear", factor=3.0),
    "gemma2-yarn": rope("yarn", factor=2.5, **_LENGTH),
    "olmo2-linear": rope("linear", factor=3.0),
    "olmo2-dynamic": rope("dynamic", factor=3.0),
    "smollm3-longrope": longrope(4),
    "starcoder2-base": rope("default", rope_theta=700.0),
    "nemotron-base": rope("default", rope_theta=700.0, partial_rotary_factor=0.5),
    "glm4-yarn": rope("yarn", factor=2.5, partial_rotary_factor=0.75, **_LENGTH),
    "olmo3-yarn": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 700.0,
                "factor": 2.5,
                "attention_factor": 1.1,
                **_LENGTH,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
    },
    "exaone4-llama3": rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_LENGTH
    ),
    "falcon-new-one-key-head": {"num_kv_heads": 1},
    # transformers 4 cannot compute these.
    "olmo2-yarn": rope("yarn", factor=2.5, **_LENGTH),
    "nemotron-linear": rope("linear", factor=3.0),
    "phi3-factor": longrope(3, attention_factor=1.7),
}
# name, which begins with that of its model -> settings that differ
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-inner": {"n_inner": 56},
    "gpt2-untied": _UNTIED,
    "gpt2-relu": {"activation_function": "relu"},
    "gpt2-exact-gelu": {"activation_function": "gelu"},
    "gpt2-eps": {"layer_norm_epsilon": 0.1},
    "opt-pre": {"do_layer_norm_before": True, "word_embed_proj_dim": 24},
    "opt-untied": {**_UNTIED, "do_layer_norm_before": True, "word_embed_proj_dim": 24},
    "opt-post": {"word_embed_proj_dim": 24},
    "opt-no-final-norm": {
        "do_layer_norm_before": True, "word_embed_proj_dim": 24, "_remove_final_layer_norm": True,
    },
    "opt-without-biases": {
        "do_layer_norm_before": True, "word_embed_proj_dim": 24, "enable_bias": False,
        "layer_norm_elementwise_affine": False, "activation_function": "gelu",
    },
    "bloom-six-heads": {"n_head": 6, "vocab_size": 131},
    "bloom-post": {"apply_residual_connection_post_layernorm": True},
    "bloom-untied": _UNTIED,
    "gptj-wide": {"n_embd": 144, "n_head": 2, "rotary_dim": 64},
    "gptj-inner": {"n_inner": 56},
    "codegen-wide": {"n_embd": 144, "n_head": 8, "rotary_dim": 10, "tie_word_embeddings": True},
    "gptneox-parallel-no-attention-bias": {"attention_bias": False},
    "gptneox-parallel-fast-gelu": {"hidden_act": "gelu_fast"},
    "gptneox-parallel-tied": _TIED,
    "llama-no-groups": {"num_key_value_heads": 4},
    "llama-tied": _TIED,
    "llama-biases": _BIASES,
    "llama-exact-gelu": {"hidden_act": "gelu"},
    "llama-tanh-gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "llama-base": rope("default", rope_theta=500.0),
    "llama-linear": rope("linear", factor=3.0),
    "llama-dynamic": rope("dynamic", factor=3.0),
    "llama-llama3": rope(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **_LENGTH
    ),
    "llama-yarn": rope("yarn", factor=2.5, **_LENGTH),
    "llama-yarn-mscale": rope(
        "yarn", factor=2.5, mscale=0.7, mscale_all_dim=0.3, beta_fast=8.0, truncate=False, **_LENGTH
    ),
    "mistral-no-window": {"sliding_window": None},
    "qwen2-tied": _TIED,
    "qwen2-window": {**_WINDOWS, "max_window_layers": 0},
    "qwen2-some-windows": {**_WINDOWS, "max_window_layers": 1},
    "qwen3-biases": {"attention_bias": True, "head_dim": 6},
    "granite-tied": _TIED,
    "granite_4-without-positions": {**_TIED, "position_embedding_type": None},
    "olmo2-no-groups": {"num_key_value_heads": 4},
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3-linear": {
        "num_hidden_layers": 8, "layer_types": None, "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3-biases": {**_BIASES, "no_rope_layers": [1, 0, 1, 1]},
    "phi3-plain": {**rope("default"), "original_max_position_embeddings": 40},
    "phi3-longrope": longrope(3),
    "phi3-window": {"sliding_window": 5},
    "starcoder2-no-biases": {**_UNTIED, "use_bias": False},
    "seed-oss-biases": {
        "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, **_TIED,
    },
    "arcee-biases": {**_BIASES, "hidden_act": "silu"},
    "ministral-some-windows": {"layer_types": ["full_attention", "sliding_attention"]},
    "ernie4_5-biases": {"use_bias": True, **_UNTIED},
    "glm-no-biases": {"attention_bias": False, **_TIED},
    "glm4-no-biases": {"attention_bias": False, **_TIED},
    "olmo3-biases": {
        "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "exaone4-no-window": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "gpt_neo-global": {
        "attention_types": [[["global"], 3]], "num_layers": 3, "intermediate_size": 56,
        "tie_word_embeddings": False, "activation_function": "relu",
    },
    "gpt_neo-local": {"attention_types": [[["local"], 1], [["local"], 1]]},
    "gpt_bigcode-heads": {"multi_query": False, "n_inner": 56, "tie_word_embeddings": False},
    "gpt_bigcode-unscaled": {"scale_attn_weights": False, "activation_function": "gelu"},
    "phi-tied": {**_TIED, "qk_layernorm": True, "num_key_value_heads": 4, "layer_norm_eps": 0.1},
    "phi-yarn": rope("yarn", factor=2.5, partial_rotary_factor=0.75, **_LENGTH),
    "stablelm-parallel": {
        "use_parallel_residual": True, "use_qkv_bias": True, "num_key_value_heads": 1,
    },
    "stablelm-tied": {**_TIED, "qk_layernorm": False, "hidden_act": "gelu"},
    "cohere-plain": {
        **_UNTIED, "use_qk_norm": False, "attention_bias": True, "num_key_value_heads": 4,
        **rope("yarn", factor=2.5, **_LENGTH),
    },
    "cohere2-tied": {
        **_TIED, "num_hidden_layers": 4, "layer_types": None, "attention_bias": True,
    },
    "hunyuan-alpha": {"attention_bias": True, **rope("dynamic", factor=1.0, alpha=50.0)},
    "apertus-plain": {"attention_bias": True, **rope("default"), **_TIED},
    "ministral3-no-window": {"sliding_window": None, **_TIED},
    "falcon-7b": {"multi_query": True, "tie_word_embeddings": False},
    "exaone3-llama3": {
        **_TIED, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **_LENGTH),
    },
    "internlm3-biases": {**_BIASES, "head_dim": 6, **rope("dynamic", factor=6.0)},
    "cwm-base": {**rope("default", rope_theta=500.0), "mlp_bias": True},
    "helium-biases": {**_BIASES, **_TIED},
    "hyperclovax-plain": {**_TIED, "use_post_norm": False, "attention_multiplier": 0.3},
    "vaultgemma-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "jais2-no-biases": {"attention_bias": False, "mlp_bias": False, **_TIED},
    "mpt-untied": {**_UNTIED, "n_heads": 4, "attn_config": {"softmax_scale": 0.3}},
    **ROTARY,
}  # fmt: skip


def model_of(name: str, **changes: Any) -> Any:
    """Return a random model whose every parameter matters: none is left at zero or one."""
    known = {**MODELS, **MIXTURES, **OTHER_MIXTURES, **SHARED_EXPERTS}
    base = max((each for each in known if name.startswith(each)), key=len)
    class_name, settings = known[base]
    settings = {**settings, **(VARIANTS[name] if name != base else {}), **changes}
    kind = getattr(transformers, class_name)
    torch.manual_seed(1)
    model_type = settings.pop("model_type", None)  # of a configuration that another class has
    make = transformers.CONFIG_MAPPING[model_type] if model_type else kind.config_class
    model = kind(make(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Save such a model."""
    model_of(name, **changes).save_pretrained(folder)
    return folder
