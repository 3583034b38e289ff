"""config.ini of T5 and BERT folders, read and written."""

from typing import Any

import pytest

from export_scripts.families.bert import BertConfig
from export_scripts.families.t5.layout import T5Config
from export_scripts.ft.config_ini import config_text, family_of, parse_ini


def t5(**changes: Any) -> T5Config:
    values: dict[str, Any] = {
        "name_or_path": "t5", "weight_data_type": "fp16", "tensor_para_size": 2, "vocab_size": 40,
        "d_model": 20, "d_kv": 6, "d_ff": 28, "num_heads": 4, "num_layers": 2,
        "num_decoder_layers": 3, "feed_forward_proj": "relu", "decoder_start_token_id": 0,
        "eos_token_id": 1, "relative_attention_num_buckets_or_max_pos_seq_len": 8,
    }  # fmt: skip
    return T5Config(**(values | changes))


def test_a_config_is_read_back_as_written():
    config = t5(t5_with_bias=True, ia3_num_tasks=2, adapter_inter_size=12, has_adapter=True)
    assert T5Config.from_sections(parse_ini(config_text(config))) == config


def test_each_side_has_its_own_depth():
    sections = t5().sections()
    assert (sections["encoder"]["num_layers"], sections["decoder"]["num_layers"]) == ("2", "3")


def test_each_side_has_what_nvidias_clients_read_of_the_whole_model():
    for side in ("encoder", "decoder"):
        written = t5(pad_id=0, use_gated_activation=True).sections()[side]
        assert written["num_decoder_layers"] == "3"
        assert (written["pad_token_id"], written["eos_token_id"]) == ("0", "1")
        assert written["is_gated_act"] == "True"


def test_whole_models_and_encoders_are_distinguished():
    encoder = t5(num_decoder_layers=0, has_lm_head=False)
    assert encoder.sections()["decoder"] == {}
    assert family_of(parse_ini(config_text(encoder))).name == "t5_encoder"
    assert family_of(parse_ini(config_text(t5()))).name == "t5"
    assert encoder.architecture().decoder_num_layer == 0


def test_stacks_that_disagree_are_refused():
    sections = t5().sections()
    sections["decoder"]["d_model"] = "24"
    with pytest.raises(ValueError, match=r"d_model = 20 in \[encoder\] but 24 in \[decoder\]"):
        T5Config.from_sections(sections)


def test_required_decoder_keys_are_named():
    sections = t5().sections()
    del sections["decoder"]["eos_token_id"]
    with pytest.raises(ValueError, match=r"\[decoder\] has no eos_token_id"):
        T5Config.from_sections(sections)


@pytest.mark.parametrize(("files", "has_head"), [(["lm_head.weight.bin"], True), ([], False)])
def test_folders_of_other_converters_show_their_head_by_its_file(files, has_head):
    sections = t5().sections()
    del sections["decoder"]["has_lm_head"]
    assert T5Config.from_sections(sections, files).has_lm_head is has_head


def test_biases_decide_norm_and_scaling():
    biased, bare = t5(t5_with_bias=True).architecture(), t5().architecture()
    assert (biased.norm, biased.scale_attention, biased.scale_logits) == ("layernorm", True, False)
    assert (bare.norm, bare.scale_attention, bare.scale_logits) == ("rmsnorm", False, True)


@pytest.mark.parametrize("word", ["absolute", "learned_absolute", "Relative"])
def test_every_word_but_relative_means_absolute(word):
    assert t5(position_embedding_type=word).architecture().position == "absolute"


def test_a_gate_without_its_switch_is_refused():
    with pytest.raises(ValueError, match="use_gated_activation"):
        t5(feed_forward_proj="gated-gelu").architecture()


def bert(**changes: Any) -> BertConfig:
    values: dict[str, Any] = {
        "model_name": "bert", "weight_data_type": "fp32", "head_num": 4, "size_per_head": 6,
        "inter_size": 28, "num_layer": 2,
    }  # fmt: skip
    return BertConfig(**(values | changes))


def test_bert_takes_the_loaders_constants_where_keys_are_absent():
    architecture = bert().architecture()
    assert (architecture.layernorm_eps, architecture.exact_gelu) == (1e-6, False)


@pytest.mark.parametrize("activation", ["gelu_new", "geglu"])
def test_bert_activations_that_the_loader_has_not_are_refused(activation):
    with pytest.raises(ValueError, match=activation):
        bert(activation_type=activation).architecture()
