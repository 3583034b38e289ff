"""Random two-layer models of every family transformers can make, saved as their folders are."""

from __future__ import annotations

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
_GEMMA = {**_LLAMA, "sliding_window": 5, "tie_word_embeddings": True, "pad_token_id": None}
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
    "gemma": ("GemmaForCausalLM", {**_GEMMA, "hidden_act": "gelu"}),
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "query_pre_attn_scalar": 11}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**_GEMMA, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
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


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Save a random model whose every parameter matters: none is left at zero or one."""
    class_name, settings = {**MODELS, **MIXTURES}[name]
    kind = getattr(transformers, class_name)
    torch.manual_seed(1)
    model = kind(kind.config_class(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder
