"""Dense decoders of Hugging Face: published configurations, and settings that are refused."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from export_scripts.checkpoints import open_checkpoint
from export_scripts.checkpoints.huggingface import open_configuration
from export_scripts.conversion.plan import find_mapping
from export_scripts.families.dense.layout import DenseConfig
from export_scripts.families.mapping.source_mapping import Facts
from export_scripts.ft.config_ini import config_text, family_of, parse_ini
from export_scripts.inspect import describe
from tests.json_files import write_json
from tests.looks import mentions

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GRANITE_33_8B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "pad_token_id": 0, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49159,
}  # fmt: skip
OLMO2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
    "tie_word_embeddings": False, "torch_dtype": "float32", "vocab_size": 100352,
}  # fmt: skip
GEMMA_7B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
    "hidden_activation": None, "hidden_size": 3072, "intermediate_size": 24576,
    "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 16, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584, "intermediate_size": 14336, "max_position_embeddings": 8192,
    "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "sliding_window_size": 4096, "torch_dtype": "float32", "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
    "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip

SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
    "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 128256,
}  # fmt: skip
PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
    "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999,
    "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1 + number / 3 for number in range(48)], "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip
STARCODER2_3B: dict[str, Any] = {
    "activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1, "attention_softmax_in_fp32": True, "bos_token_id": 0,
    "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072, "intermediate_size": 12288, "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "sliding_window": 4096, "torch_dtype": "float32",
    "use_bias": True, "vocab_size": 49152,
}  # fmt: skip
MINITRON_8B: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2, "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2",
    "hidden_size": 4096, "intermediate_size": 16384, "max_position_embeddings": 4096,
    "mlp_bias": False, "model_type": "nemotron", "norm_eps": 1e-05, "num_attention_heads": 48,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}  # fmt: skip
FALCON_7B: dict[str, Any] = {
    "alibi": False, "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
    "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "parallel_attn": True, "torch_dtype": "bfloat16", "vocab_size": 65024,
}  # fmt: skip
FALCON_40B: dict[str, Any] = {
    **FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True,
    "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip
GPT_NEO_13B: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"],
    "attention_dropout": 0, "attention_layers": ["global", "local"] * 12,
    "attention_types": [[["global", "local"], 12]], "bos_token_id": 50256, "embed_dropout": 0,
    "eos_token_id": 50256, "gradient_checkpointing": False, "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": None, "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 16, "num_layers": 24,
    "resid_dropout": 0, "tokenizer_class": "GPT2Tokenizer", "use_cache": True,
    "vocab_size": 50257, "window_size": 256,
}  # fmt: skip
STARCODER: dict[str, Any] = {
    "activation_function": "gelu", "architectures": ["GPTBigCodeForCausalLM"],
    "attention_softmax_in_fp32": True, "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1,
    "eos_token_id": 0, "inference_runner": 0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "max_batch_size": None, "max_sequence_length": None,
    "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48,
    "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "pad_key_length": True,
    "pre_allocate_kv_cache": False, "resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "use_cache": True, "validate_runner_input": True,
    "vocab_size": 49152,
}  # fmt: skip
PHI_2: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 51200,
}  # fmt: skip
STABLELM2_12B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 100257,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 13824, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
    "num_hidden_layers": 40, "num_key_value_heads": 8, "partial_rotary_factor": 0.25,
    "qk_layernorm": True, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_parallel_residual": True,
    "use_qkv_bias": False, "vocab_size": 100352,
}  # fmt: skip

EXAONE4_32B: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 361, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 27392,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 102400,
}  # fmt: skip
COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192,
    "initializer_range": 0.02, "intermediate_size": 22528, "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072,
    "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0,
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
    "max_position_embeddings": 8192, "model_type": "cohere2", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16", "use_cache": True, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
    "vocab_size": 256000,
}  # fmt: skip

# name -> (config.json as published, parameters, traits)
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360, {"query_key_norm": "head", "sliding_window": None}),
    "granite-3.3-8b-base": (
        GRANITE_33_8B, 8_170_864_640,
        {"attention_scale": 0.0078125, "logit_scale": 0.0625, "residual_scale": 0.22},
    ),
    "OLMo-2-1124-7B": (
        OLMO2_7B, 7_298_617_344,
        {"query_key_norm": "all", "has_input_norms": False, "has_output_norms": True,
         "layernorm_eps": 1e-6},
    ),
    "gemma-7b": (
        GEMMA_7B, 8_537_680_896,
        {"exact_gelu": False, "norm_one_plus": True, "has_output_norms": False,
         "embedding_scale": 3072**0.5},
    ),
    "gemma-2-9b": (
        GEMMA2_9B, 9_241_705_984,
        {"attention_scale": 1 / 16, "logit_softcap": 30.0, "attention_softcap": 50.0,
         "sliding_window": 4096, "sliding_layers": (True, False) * 21},
    ),
    "SmolLM3-3B-Base": (
        SMOLLM3_3B, 3_075_098_624,
        {"rotary_layers": (True, True, True, False) * 9, "sliding_window": None},
    ),
    "EXAONE-4.0-32B": (
        EXAONE4_32B, 32_003_216_384,
        {"rotary_layers": (True, True, True, False) * 16, "has_input_norms": False,
         "sliding_layers": (True, True, True, False) * 16, "query_key_norm": "head"},
    ),
    "Phi-4-mini-instruct": (PHI4_MINI, 3_836_021_760, {"sliding_window": 262144}),
    "starcoder2-3b": (
        STARCODER2_3B, 3_030_371_328,
        {"norm": "layernorm", "gated": False, "activation": "gelu", "sliding_window": 4096},
    ),
    "Minitron-8B-Base": (
        MINITRON_8B, 8_271_699_968,
        {"activation": "relu2", "norm_one_plus": True, "norm": "layernorm", "gated": False},
    ),
    "falcon-7b": (
        FALCON_7B, 6_921_720_704, {"residual": "parallel_shared", "kv_head_num": 1},
    ),
    "falcon-40b": (FALCON_40B, 41_303_293_952, {"residual": "parallel", "kv_head_num": 8}),
    "gpt-neo-1.3B": (
        GPT_NEO_13B, 1_315_575_808,
        {"position": "learned", "attention_scale": 1.0, "sliding_layers": (False, True) * 12},
    ),
    "starcoder": (STARCODER, 15_517_456_384, {"position": "learned", "kv_head_num": 1}),
    "phi-2": (PHI_2, 2_779_683_840, {"residual": "parallel_shared", "head_bias": True}),
    "stablelm-2-12b": (
        STABLELM2_12B, 12_143_185_920,
        {"residual": "parallel_shared", "query_key_norm": "heads", "norm": "layernorm"},
    ),
    "c4ai-command-r-v01": (
        COMMAND_R, 34_980_831_232,
        {"residual": "parallel_shared", "position": "rotary_interleaved", "query_key_norm": None},
    ),
    "c4ai-command-r7b": (
        COMMAND_R7B, 8_028_033_024,
        {"rotary_layers": (True, True, True, False) * 8, "logit_scale": 0.25},
    ),
    "gemma-3-1b-pt": (
        GEMMA3_1B, 999_885_952,
        {"sliding_layers": ((True,) * 5 + (False,)) * 4 + (True, True), "norm_one_plus": True,
         "embedding_scale": 1152**0.5, "logit_softcap": None},
    ),
}  # fmt: skip


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", settings)
    return folder


def config_of(folder: Path) -> DenseConfig:
    reader = open_configuration(folder)
    facts = Facts(reader=reader, tp_size=1, weight_data_type="bf16")
    mapping, facts = find_mapping(facts)
    config = mapping.config(facts)
    assert isinstance(config, DenseConfig)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_composes(name, tmp_path):
    settings, parameters, traits = PUBLISHED[name]
    folder = write_config(tmp_path, settings)
    found = describe(folder)
    assert found["family"] == "llama"
    assert found["parameters"] == parameters
    assert "cannot be converted" not in found
    config = config_of(folder)
    architecture = config.architecture()
    assert {key: getattr(architecture, key) for key in traits} == traits
    sections = parse_ini(config_text(config))
    assert family_of(sections).config.from_sections(sections) == config


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        (
            GEMMA2_9B,
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention = True: attention is bidirectional",
        ),
        (GEMMA2_9B, {"final_logit_softcapping": -1}, "final_logit_softcapping = -1 is out of"),
        *(
            (
                GEMMA3_1B,
                {"rope_scaling": None, "rope_parameters": found},
                "transformers 5 only reads",
            )
            for found in ({"rope_theta": 500.0}, {"rope_type": "yarn", "factor": 2.0})
        ),
        (
            GEMMA3_1B,
            {"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "layers have different rotary positions",
        ),
        (
            GEMMA3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "layers with a window have plain rotary positions",
        ),
        (GRANITE_33_8B, {"attention_multiplier": "x"}, "attention_multiplier = 'x' is out of"),
        (
            PHI4_MINI,
            {"rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]}},
            "rotary_long_factor has 1 factors for 96 rotated dimensions: expected 48",
        ),
        (PHI4_MINI, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "computes longrope"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "an entry for each of the 36 layers"),
        (EXAONE4_32B, {"layer_types": ["full_attention"] * 64}, "none would rotate"),
        (EXAONE4_32B, {"layer_types": None}, "sliding_window_pattern = 'LLLG' is not a count"),
        (
            OLMO2_7B,
            {"model_type": "olmo3", "rope_theta": 7},
            "rope_theta = 7: transformers 4 uses",
        ),
        (FALCON_7B, {"alibi": True}, "alibi = True: scores are rounded"),
        (FALCON_40B, {"parallel_attn": False}, "transformers has no such model"),
        *(
            (GPT_NEO_13B, changes, "expected global or local for each of the 24 layers")
            for changes in (
                {"attention_layers": ["global"] * 24},
                {"attention_types": [[["global", "none"], 12]], "attention_layers": None},
                {"attention_types": [[["global"], "x"]]},
                {"attention_types": [[["global"], 10**12]], "attention_layers": None},
                {"attention_types": 24, "attention_layers": None},
            )
        ),
        (STABLELM2_12B, {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor = 2.0: positions"),
        (COMMAND_R, {"rope_theta": None}, "no rope_theta: transformers 4 uses 10000 and 5"),
        (COMMAND_R7B, {"sliding_window": None}, "no layer would rotate"),
        (COMMAND_R7B, {"layer_types": ["full_attention"] * 32}, "none would rotate"),
        (COMMAND_R7B, {"use_parallel_block": False}, "attention and MLP are sequential"),
        (OLMO2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 cannot be"),
        *(
            (OLMO2_7B, {"model_type": "mpt", "attn_config": {name: value}}, f"{name} = {value}")
            for name, value in (("alibi", False), ("attn_logit_softcapping", 50.0), ("nope", True))
        ),
        *(
            (
                GRANITE_33_8B,
                {"model_type": "granitemoehybrid", **changes},
                "a Granite 4 has to have",
            )
            for changes in (
                {"layer_types": ["mamba"], "num_local_experts": 0},
                {"layer_types": 40, "num_local_experts": 0},
                {"layer_types": ["attention"] * 40},
            )
        ),
        (OLMO2_7B, {"model_type": "llama", "draft_vocab_size": 9}, "drafts tokens for another"),
        *(
            (
                GRANITE_33_8B,
                {
                    "model_type": "ministral3",
                    "rope_scaling": {"rope_type": kind, "factor": 2.0, "llama_4_scaling_beta": 0.1},
                },
                "queries grow with its original_max_position_embeddings",
            )
            for kind in ("linear", "dynamic")
        ),
    ],
)
def test_settings_that_the_layout_lacks_are_refused_together(settings, changes, words, tmp_path):
    folder = write_config(tmp_path, {**settings, **changes, "vocab_size": "many"})
    problems = describe(folder)["cannot be converted"]
    assert mentions(problems, words), problems
    assert mentions(problems, "vocab_size = 'many'")


@pytest.mark.parametrize("equal", [True, False])
def test_a_falcon_is_tied_only_if_its_head_is_its_embedding(equal, tmp_path):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 5}
    embedding = torch.arange(40.0).reshape(5, 8)
    tensors = {
        "transformer.word_embeddings.weight": embedding,
        "lm_head.weight": embedding.clone() if equal else embedding + 1,
    }
    folder = write_config(tmp_path, FALCON_7B | sizes)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    facts = Facts(reader=open_checkpoint(folder), tp_size=1, weight_data_type="fp32")
    mapping, facts = find_mapping(facts)
    config = mapping.config(facts)
    assert isinstance(config, DenseConfig)
    assert config.tie_word_embeddings is equal


def test_longrope_is_kept_with_its_factors(tmp_path):
    config = config_of(write_config(tmp_path, PHI4_MINI))
    rotary = config.architecture().rotary
    assert rotary is not None
    assert (rotary.dims, rotary.kind) == (96, "longrope")
    assert rotary.scaling["long_factor"] == tuple(1 + number / 3 for number in range(48))
    # sqrt(1 + ln(131072 / 4096) / ln(4096))
    assert rotary.scaling["attention_factor"] == pytest.approx(1.190238)
    assert all(len(line) < 200 for line in config_text(config).splitlines())
