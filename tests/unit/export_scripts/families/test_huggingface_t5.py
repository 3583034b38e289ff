"""Hugging Face T5s: where files of different ages keep things, and what is refused."""

from pathlib import Path

import pytest
import torch

from export_scripts.ft.config_ini import parse_ini
from tests.conversions import converted, refusal, remarks_of
from tests.tiny_huggingface import copy_of, read_tensors

SHARED_KEY = "shared.weight"


@pytest.fixture
def tied(shared: Path) -> Path:
    return shared / "golden/t5/relu_tied/source"


@pytest.fixture
def untied(shared: Path) -> Path:
    return shared / "golden/t5/v1_1_gated_gelu_untied/source"


def test_the_embedding_is_found_under_its_other_names(tied, tmp_path):
    table = read_tensors(tied)[SHARED_KEY]
    changes = {SHARED_KEY: None, "encoder.embed_tokens.weight": table}
    source = copy_of(tied, tmp_path / "hf", tensors=changes)
    assert torch.equal(converted(source, tmp_path / "out").read("shared.weight_T"), table)


def test_repeated_copies_of_the_embedding_are_accepted(tied, tmp_path):
    table = read_tensors(tied)[SHARED_KEY]
    copies = {f"{side}.embed_tokens.weight": table.clone() for side in ("encoder", "decoder")}
    converted(copy_of(tied, tmp_path / "hf", tensors=copies), tmp_path / "out")


def test_stacks_with_embeddings_of_their_own_are_refused(tied, tmp_path):
    table = read_tensors(tied)[SHARED_KEY]
    source = copy_of(tied, tmp_path / "hf", tensors={"decoder.embed_tokens.weight": table + 1})
    assert "decoder.embed_tokens.weight differs from shared.weight" in refusal(source, tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dense_act_fn": "gelu_fast"}, ("gelu", False, False)),
        ({"dense_act_fn": "gelu"}, ("gelu", True, False)),
        ({"feed_forward_proj": "gated-relu", "is_gated_act": False}, ("relu", False, False)),
    ],
)
def test_the_activation_takes_precedence_over_the_name_it_is_derived_from(
    tied, tmp_path, settings, expected
):
    kept = {"dense_act_fn": "relu", "is_gated_act": False} | settings
    config = converted(copy_of(tied, tmp_path / "hf", config=kept), tmp_path / "out").config
    found = (config.feed_forward_proj, config.exact_gelu, config.use_gated_activation)
    assert found == expected


def test_two_names_of_a_size_that_differ_are_refused(tied, tmp_path):
    source = copy_of(tied, tmp_path / "hf", config={"num_hidden_layers": 1})
    assert "but num_hidden_layers = 1, two spellings of one setting" in refusal(source, tmp_path)


def test_an_untied_head_that_is_missing_is_named(untied, tmp_path):
    source = copy_of(untied, tmp_path / "hf", tensors={"lm_head.weight": None})
    assert "lm_head.weight is missing" in refusal(source, tmp_path)


def test_scaling_stated_on_its_own_wins(untied, tmp_path):
    # transformers 5 writes tie_word_embeddings = true for every T5.
    settings = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    reader = converted(copy_of(untied, tmp_path / "hf", config=settings), tmp_path / "out")
    assert not reader.config.architecture().scale_logits


def test_negative_token_ids_count_as_none(tied, tmp_path):
    tokens = dict.fromkeys(("pad_token_id", "decoder_start_token_id", "eos_token_id"), -1)
    source = copy_of(tied, tmp_path / "hf", config=tokens)
    remarks = remarks_of(source, tmp_path / "out")
    for said in ("pad_id is 0", "start_id is 0", "end_id is 1"):
        assert f"-1 of the checkpoint counts as none; {said}" in remarks


def test_the_unread_table_of_early_files_is_left_out(tied, tmp_path):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    source = copy_of(tied, tmp_path / "hf", tensors={name: torch.zeros(8, 4)})
    converted(source, tmp_path / "out")


@pytest.mark.parametrize("version", ["4.57.6", "5.24.0"])
def test_it_is_said_of_an_mt5_that_releases_scale_differently(tied, tmp_path, version):
    settings = {"model_type": "mt5", "tie_word_embeddings": True, "transformers_version": version}
    source = copy_of(tied, tmp_path / "hf", config=settings)
    is_said = "tie_word_embeddings=False" in remarks_of(source, tmp_path / "out")
    assert is_said == version.startswith("4.")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"is_encoder_decoder": False}, "the checkpoint holds a decoder"),
        ({"dense_act_fn": "tanh"}, "dense_act_fn = tanh cannot be represented"),
        ({"model_type": "umt5"}, "unknown architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"relative_attention_max_distance": 4}, "buckets = 8 with relative_attention_max_dist"),
    ],
    ids=["decoder", "activation", "umt5", "quantised", "reach"],
)
def test_models_that_ft_cannot_express_are_refused(tied, tmp_path, settings, words):
    assert words in refusal(copy_of(tied, tmp_path / "hf", config=settings), tmp_path)


def test_a_whole_model_becomes_a_whole_folder_unless_asked(untied, tmp_path):
    assert converted(untied, tmp_path / "whole").family.name == "t5"
    reader = converted(untied, tmp_path / "encoder", model_type="t5_encoder")
    assert reader.family.name == "t5_encoder"
    assert not any(name.startswith(("decoder.", "lm_head")) for name in reader.names())
    assert parse_ini((reader.path / "config.ini").read_text())["decoder"] == {}


def test_an_encoder_alone_is_recognised(untied, tmp_path):
    dropped = {
        key: None for key in read_tensors(untied) if key.startswith(("decoder.", "lm_head."))
    }
    source = copy_of(untied, tmp_path / "hf", tensors=dropped)
    assert converted(source, tmp_path / "out").family.name == "t5_encoder"


def test_a_reach_that_ft_does_not_know_keeps_it_from_serving(tied, tmp_path):
    source = copy_of(tied, tmp_path / "hf", config={"relative_attention_max_distance": 64})
    reader = converted(source, tmp_path / "out")
    (reason,) = reader.config.ft_limits()
    assert "relative_attention_max_distance = 64" in reason


def test_half_precision_is_warned_of_with_the_remedy(tied, tmp_path):
    remark = remarks_of(tied, tmp_path, weight_data_type="fp16")
    assert "overflow" in remark
    assert "serve with data_type bf16 or fp32" in remark
    assert remarks_of(tied, tmp_path / "b", weight_data_type="bf16") == ""
