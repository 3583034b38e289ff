"""GPT-2, OPT and BLOOM folders: what config.json becomes, and NVIDIA's mistakes avoided."""

from pathlib import Path

import pytest
import torch

from tests.conversions import converted, problems_of
from tests.tiny_huggingface import copy_of

HEAD = "model.lm_head.weight"


@pytest.fixture
def golden(shared: Path) -> Path:
    return shared / "golden"


def test_gpt2_epsilon_is_written(golden, tmp_path):
    source = copy_of(
        golden / "gpt2/tiny/source", tmp_path / "s", config={"layer_norm_epsilon": 3e-4}
    )
    assert converted(source, tmp_path).config.layernorm_eps == 3e-4


def test_stated_values_that_ask_for_other_tensors_are_refused(golden, tmp_path):
    given = (("has_pre_decoder_layernorm", "true"),)
    text = problems_of(golden / "gpt2/tiny/source", tmp_path, given=given)
    assert "has no model.pre_decoder_layernorm.weight, which a stated value" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("has_positional_encoding", "true"), "max_pos_seq_len = None: tensors"),
        (("head_num", "-1"), "head_num = -1: tensors"),
    ],
)
def test_stated_sizes_that_no_tensor_has_are_refused(golden, tmp_path, given, words):
    assert words in problems_of(golden / "bloom/tiny/source", tmp_path, given=(given,))


@pytest.mark.parametrize("key", ["activation_type", "layernorm_type"])
def test_stated_choices_that_no_loader_has_are_refused(golden, tmp_path, key):
    text = problems_of(golden / "gpt2/tiny/source", tmp_path, given=((key, "scalenorm"),))
    assert "scalenorm" in text
    assert "known: " in text


@pytest.mark.parametrize("case", ["gpt2/tiny", "bloom/tiny", "opt/pre_ln"])
def test_a_head_that_differs_from_its_embedding_counts_whatever_the_settings_say(
    golden, tmp_path, case
):
    values = torch.randn(131, 32)
    source = copy_of(golden / case / "source", tmp_path / "s", tensors={"lm_head.weight": values})
    assert torch.equal(converted(source, tmp_path).read(HEAD), values)


def test_opt_int8_scales_stay_fp32_in_an_fp16_folder(golden, tmp_path):
    case = golden / "opt/int8_static/source"
    ranges = case / "act_scales.pt"
    half = converted(case, tmp_path / "half", weight_data_type="fp16", activation_ranges=ranges)
    full = converted(case, tmp_path / "full", activation_ranges=ranges)
    name = "model.layers.0.mlp.dense_h_to_4h.scale"
    assert (half.path / f"{name}.bin").stat().st_size == 4  # the reference writes 2 bytes
    assert torch.equal(half.read(name), full.read(name))


def test_every_missing_activation_range_is_named(golden, tmp_path):
    ranges = tmp_path / "ranges.json"
    ranges.write_text('{"model.decoder.layers.0.fc1": {"input": 0.0, "output": 1.0}}')
    text = problems_of(golden / "opt/pre_ln/source", tmp_path, activation_ranges=ranges)
    assert "model.decoder.layers.0.fc1 has input = 0.0" in text
    assert "model.decoder.layers.1.self_attn.q_proj has output = None" in text


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("/a/100%best", "100best"),
        ("one ; two\n[gpt]", "one  two[gpt]"),
        ("x" * 300, "x" * 120),
        (";%", "gpt"),
    ],
)
def test_a_name_does_not_spoil_the_configuration(golden, tmp_path, name, kept):
    source = copy_of(golden / "gpt2/tiny/source", tmp_path / "s", config={"_name_or_path": name})
    assert converted(source, tmp_path).config.model_name == kept


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("gpt2/tiny", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2/tiny", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gpt2/tiny", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2/tiny", {"activation_function": "mish"}, "activation_function = mish"),
        ("gpt2/tiny", {"n_embd": 30}, "n_embd by n_head: 30 does not divide by 4"),
        ("gpt2/tiny", {"n_layer": None}, "has no n_layer"),
        ("gpt2/tiny", {"vocab_size": "many"}, "vocab_size = 'many' is not a count"),
        ("gpt2/tiny", {"n_layer": 0}, "n_layer = 0 is not a count"),
        (
            "gpt2/tiny",
            {"layer_norm_epsilon": float("nan")},
            "layer_norm_epsilon = nan is out of range",
        ),
        ("gpt2/tiny", {"layer_norm_epsilon": 1e400}, "layer_norm_epsilon = inf is out of range"),
        ("gpt2/tiny", {"layer_norm_epsilon": -1e-5}, "expected a number greater than 0"),
        ("gpt2/tiny", {"activation_function": ["relu"]}, "activation_function = ['relu'] cannot"),
        ("gpt2/tiny", {"eos_token_id": {"id": 2}}, "eos_token_id = {'id': 2} is not a token id"),
        ("gpt2/tiny", {"eos_token_id": 2**80}, f"eos_token_id = {2**80} is not a token id"),
        ("gpt2/tiny", {"bos_token_id": "</s>"}, "bos_token_id = '</s>' is not a token id"),
        ("opt/pre_ln", {"activation_function": "swiglu"}, "activation_function = swiglu"),
        ("bloom/tiny", {"quantization_config": {"quant_method": "gptq"}}, "gptq of None bits"),
        ("bloom/tiny", {"quantization_config": "int8"}, "quant_method = int8"),
    ],
)
def test_models_beyond_the_layout_are_refused(golden, tmp_path, case, settings, words):
    source = copy_of(golden / case / "source", tmp_path / "s", config=settings)
    assert words in problems_of(source, tmp_path)


def test_all_refusals_are_listed_together(golden, tmp_path):
    settings = {"scale_attn_weights": False, "activation_function": "mish", "n_head": None}
    source = copy_of(golden / "gpt2/tiny/source", tmp_path / "s", config=settings)
    text = problems_of(source, tmp_path)
    assert all(words in text for words in ("scale_attn_weights", "mish", "has no n_head"))


def test_token_ids_left_out_are_the_librarys_own(golden, tmp_path):
    settings = {"bos_token_id": None, "eos_token_id": [7, 8]}  # None leaves the key out
    source = copy_of(golden / "bloom/tiny/source", tmp_path / "s", config=settings)
    config = converted(source, tmp_path).config
    assert (config.start_id, config.end_id) == (1, 7)


def test_bloom_post_is_not_for_fastertransformer(golden, tmp_path):
    settings = {"apply_residual_connection_post_layernorm": True}
    source = copy_of(golden / "bloom/tiny/source", tmp_path / "s", config=settings)
    reader = converted(source, tmp_path)
    assert reader.config.layernorm_type == "post_layernorm"
    assert "bloom-post" in reader.config.ft_limits()[0]
