"""The layout of dense decoders: which models are taken, and how heads are divided."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.ft.generation_file import generation_settings
from inference.engine.engine import Engine, Placement
from tests.conversions import converted, folder_of, problems_of, remarks_of
from tests.json_files import write_json

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 56, "vocab_size": 53,
    "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], h),
        "lm_head.weight": (config["vocab_size"], h),
        "model.norm.weight": (h,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (h,),
            prefix + "post_attention_layernorm.weight": (h,),
            prefix + "self_attn.q_proj.weight": (n * d, h),
            prefix + "self_attn.k_proj.weight": (k * d, h),
            prefix + "self_attn.v_proj.weight": (k * d, h),
            prefix + "self_attn.o_proj.weight": (h, n * d),
            prefix + "mlp.gate_proj.weight": (f, h),
            prefix + "mlp.up_proj.weight": (f, h),
            prefix + "mlp.down_proj.weight": (h, f),
        }
        if config["model_type"] == "qwen2":
            biases = {"q": n * d, "k": k * d, "v": k * d}
            shapes |= {f"{prefix}self_attn.{x}_proj.bias": (w,) for x, w in biases.items()}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write_llama(folder: Path, **changes: Any) -> Path:
    config = CONFIG | changes
    folder.mkdir()
    write_json(folder / "config.json", config)
    safetensors.torch.save_file(tensors(config), folder / "model.safetensors")
    return folder


def config_for(tp_size: int, **changes: Any) -> DenseConfig:
    values: dict[str, Any] = {
        "model_name": "x", "head_num": 12, "kv_head_num": 4, "size_per_head": 8, "hidden_size": 72,
        "inter_size": 96, "num_layer": 2, "vocab_size": 53, "max_pos_seq_len": 40, "start_id": 1,
        "end_id": 2, "layernorm_eps": 1e-5, "rotary_embedding": 8, "weight_data_type": "fp32",
        "tensor_para_size": tp_size,
    }  # fmt: skip
    return DenseConfig(**values | changes)


@pytest.mark.parametrize(("tp_size", "stored"), [(1, 4), (2, 4), (4, 4), (12, 12)])
def test_every_rank_has_a_key_head(tp_size, stored):
    architecture = config_for(tp_size).architecture()
    assert architecture.kv_head_num == stored
    assert architecture.kv_head_num % tp_size == 0


def test_ranks_that_neither_divide_nor_are_multiples_of_the_key_heads_are_refused(tmp_path):
    source = write_llama(tmp_path / "s", num_attention_heads=12, num_key_value_heads=4)
    text = problems_of(source, tmp_path, tp_size=6)
    assert "does not divide kv_head_num=4" in text
    assert "use 1, 2 or 4" in text
    text = problems_of(source, tmp_path, tp_size=8)
    assert "does not divide head_num=12" in text


def test_fastertransformer_is_known_not_to_serve_it():
    assert not DENSE.ft_backend


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("yarn", "yarn needs rotary_factor\nrotary_scaling_type = yarn needs rotary_original_max"),
        ("spiral", "rotary_scaling_type = spiral; known: None, linear"),
    ],
)
def test_a_folder_whose_rotary_scaling_is_incomplete_is_refused(kind, words):
    with pytest.raises(ValueError, match=words):
        config_for(1, rotary_scaling_type=kind)


@pytest.mark.parametrize("name", ["logit_scale", "attention_softcap", "rotary_base"])
def test_a_folder_whose_numbers_are_not_positive_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} = 0.0: expected a number greater than 0"):
        config_for(1, **{name: 0.0})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "without short_factor, long_factor"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, 1], "long_factor": [1, 1, 1, 1]}},
            "rotary_short_factor has 2 factors for 8 rotated dimensions: expected 4",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1, "x"], "long_factor": [0]}},
            "long_factor = [0]: expected a list of numbers greater than 0",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "without low_freq_factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "layers have different rotary positions; expected one table",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 cannot be represented"),
        ({"hidden_act": "quick_gelu"}, "hidden_act = quick_gelu cannot be represented"),
        ({"num_key_value_heads": 3}, "4 does not divide by 3"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "expected one entry for each of the 2 layers",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]},
            "linear_attention cannot be represented",
        ),
        *(
            (
                {"model_type": model, "sliding_window": 8,
                 "layer_types": [f"{first}_attention", f"{second}_attention"]},
                "some layers lack the sliding window",
            )
            for model, first, second in (
                ("mistral", "full", "sliding"),
                ("mistral", "full", "full"),
                ("phi3", "sliding", "full"),
                ("starcoder2", "full", "full"),
            )
        ),
        ({"head_dim": 7}, "rotary_embedding = 7 is not an even number of at most the head"),
        ({"attention_bias": None}, "attention_bias = None is neither true nor false"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"mlp_bias": True}, "mlp.down_proj.bias is missing"),
    ],
)  # fmt: skip
def test_models_beyond_the_layout_are_refused(tmp_path, settings, words):
    assert words in problems_of(write_llama(tmp_path / "s", **settings), tmp_path)


def test_biases_that_the_configuration_denies_are_unknown_tensors(tmp_path):
    source = write_llama(tmp_path / "s", attention_bias=False)
    state = tensors(CONFIG | {"model_type": "qwen2"})
    safetensors.torch.save_file(state, source / "model.safetensors")
    assert "self_attn.q_proj.bias [[32]] is not a tensor of" in problems_of(source, tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sliding_window": 8}, "sliding_window = 8 is left out"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.Y"}}, "custom code (modeling_x.Y)"),
    ],
)
def test_what_transformers_does_not_compute_is_reported(tmp_path, settings, words):
    source = write_llama(tmp_path / "s", **settings)
    assert words in remarks_of(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, 8),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "llama", "sliding_window": 8}, None),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}, None),
        ({"model_type": "qwen2", "sliding_window": 8}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8,
          "max_window_layers": 2}, None),
    ],
)  # fmt: skip
def test_the_sliding_window_follows_the_kind_of_model(tmp_path, settings, window):
    source = write_llama(tmp_path / "s", **settings)
    assert converted(source, tmp_path / "out").config.sliding_window == window


@pytest.mark.parametrize(
    ("generation", "given", "expected"),
    [
        ({"bos_token_id": 4, "eos_token_id": [5, 6]}, (), (4, 5)),
        ({"eos_token_id": 5}, (), (5, 5)),
        ({}, (("start_id", "8"), ("end_id", "9")), (8, 9)),
    ],
)
def test_token_ids_set_to_null_are_looked_for_elsewhere(tmp_path, generation, given, expected):
    source = write_llama(tmp_path / "s", bos_token_id=None, eos_token_id=None)
    write_json(source / "generation_config.json", generation)
    config = converted(source, tmp_path / "out", given=given).config
    assert (config.start_id, config.end_id) == expected


@pytest.mark.parametrize(
    ("settings", "expected", "words"),
    [
        ({"bos_token_id": 3, "eos_token_id": -1}, (3, 3), "eos_token_id = -1 of the checkpoint"),
        ({"bos_token_id": -1, "eos_token_id": 3}, (3, 3), "counts as none; start_id is 3"),
        ({"eos_token_id": [-1, 5]}, (1, 5), None),
        ({"pad_token_id": -1}, (1, 2), None),
    ],
)
def test_a_negative_token_id_counts_as_none(tmp_path, settings, expected, words):
    source = write_llama(tmp_path / "s", **settings)
    remarks = remarks_of(source, tmp_path / "o")
    assert ("counts as none" in remarks) is (words is not None)
    assert (words or "") in remarks
    config = converted(source, tmp_path / "out").config
    assert (config.start_id, config.end_id) == expected


@pytest.mark.parametrize("token", [-1, 1 << 80])
def test_an_added_token_that_the_tokenizer_cannot_load_is_refused(tmp_path, token):
    source = write_llama(tmp_path / "s", bos_token_id=None, eos_token_id=None)
    added = {"added_tokens": [{"id": token, "content": "</s>"}]}
    write_json(source / "tokenizer.json", added)
    (source / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    words = f"added token '</s>' has the id {token}, which the tokenizers library refuses"
    assert words in problems_of(source, tmp_path)


def test_generation_config_that_nests_too_deep_is_refused(tmp_path):
    source = write_llama(tmp_path / "s", bos_token_id=None)
    (source / "generation_config.json").write_text("[" * 100_000)
    assert "generation_config.json is not a JSON object" in problems_of(source, tmp_path)


def test_unknown_token_ids_are_asked_for(tmp_path):
    source = write_llama(tmp_path / "s", model_type="qwen2", bos_token_id=None, eos_token_id=None)
    assert "state --set start_id=.. --set end_id=.." in problems_of(source, tmp_path)


@pytest.mark.parametrize(("kind", "warned"), [("qwen2", True), ("llama", False)])
def test_fp16_is_warned_about_where_it_is_known_to_overflow(tmp_path, kind, warned):
    source = write_llama(tmp_path / "s", model_type=kind, torch_dtype="bfloat16")
    assert (
        "trained in bf16" in remarks_of(source, tmp_path / "out", weight_data_type="fp16")
    ) is warned


GEMMA_3 = {"config": {"eos_token_id": [1, 106]}, "generation": {"eos_token_id": [1, 106]}}
GEMMA_2 = {"config": {"eos_token_id": 1}, "generation": {"eos_token_id": [1, 107]}}
PHI_3 = {"config": {"eos_token_id": 90}, "generation": {"eos_token_id": [90, 91, 97]}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (GEMMA_3, (1, 106)),
        (GEMMA_2, (1, 107)),
        (PHI_3, (90, 91, 97)),
        ({"config": {"eos_token_id": [2, 7, 9]}}, (2, 7, 9)),
        ({"config": {"eos_token_id": 2}, "generation": {"top_k": 5}}, (2,)),
        ({"config": {"eos_token_id": [2, -1]}, "generation": {"eos_token_id": 7}}, (2, 7)),
        ({"config": {"eos_token_id": 2}, "token": "</s>"}, (2, 5)),
        ({**PHI_3, "given": (("end_id", "8"),)}, (8,)),
    ],
)
def test_the_folder_names_every_token_that_ends_an_answer(tmp_path, files, expected):
    source = write_llama(tmp_path / "s", **files["config"])
    if "generation" in files:
        write_json(source / "generation_config.json", files["generation"])
    if "token" in files:
        added = {"added_tokens": [{"id": 5, "content": files["token"]}]}
        write_json(source / "tokenizer.json", added)
        write_json(source / "tokenizer_config.json", {"eos_token": files["token"]})
    given = files.get("given", ())
    folder_of(source, tmp_path / "out", given=given)
    folder = tmp_path / "out" / "1-gpu"
    with Engine(folder, Placement(device="cpu")) as engine:
        assert engine.limits.end_ids == expected
    kept = generation_settings(folder)
    assert kept.get("top_k") == files.get("generation", {}).get("top_k")


@pytest.mark.parametrize("value", ["</s>", [2, None], {"id": 2}, True, [1 << 40]])
def test_an_end_token_that_is_no_token_is_refused(tmp_path, value):
    source = write_llama(tmp_path / "s", eos_token_id=2)
    write_json(source / "generation_config.json", {"eos_token_id": value})
    assert "eos_token_id" in problems_of(source, tmp_path)
