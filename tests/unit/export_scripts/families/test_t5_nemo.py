"""NeMo T5s: what config.ini says, what is tuned on top, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.conversion.convert import convert
from export_scripts.ft.config_ini import parse_ini
from export_scripts.ft.reader import FTReader
from export_scripts.ft.validation import validate_directory
from tests.conversions import converted, refusal, request_of
from tests.looks import mentions
from tests.tiny_t5 import ROOT, TinyT5, t5_config, t5_tensors, write_t5
from tests.tiny_t5_tuning import (
    adapter_tensors,
    ia3_scalers,
    write_adapter,
    write_ia3,
    write_prompts,
)

MODEL = TinyT5()
EMBEDDING = ROOT + "encoder_embedding.word_embeddings.weight"


def nemo(tmp_path: Path, model: TinyT5 = MODEL, **layout: Any) -> Path:
    return write_t5(tmp_path / "t5.nemo", t5_tensors(model), model, **layout)


def ini(reader: FTReader) -> dict[str, dict[str, str]]:
    return parse_ini((reader.path / "config.ini").read_text())


def test_swiglu_is_spelled_as_the_loader_knows_it(tmp_path):
    keys = ini(converted(nemo(tmp_path, TinyT5(activation="swiglu")), tmp_path))
    assert keys["encoder"]["feed_forward_proj"] == "gated-silu"
    assert keys["structure"]["use_gated_activation"] == "True"


def test_head_size_defaults_to_the_hidden_size_over_the_heads(tmp_path):
    model = TinyT5(hidden=24)
    config = t5_config(model)
    for side in ("encoder", "decoder"):
        config[side]["kv_channels"] = None
    source = write_t5(tmp_path / "t5.nemo", t5_tensors(model), model, config=config)
    assert ini(converted(source, tmp_path))["encoder"]["d_kv"] == "6"


def test_flat_configurations_are_read(tmp_path):
    model = TinyT5(decoder_layers=2)
    reader = converted(nemo(tmp_path, model, nested=False), tmp_path)
    assert ini(reader)["decoder"]["num_layers"] == "2"


def test_a_stated_epsilon_is_kept_and_warned_of(tmp_path):
    config = t5_config(MODEL)
    for side in ("encoder", "decoder"):
        config[side]["layernorm_epsilon"] = 1e-5
    source = nemo(tmp_path, config=config)
    summary = convert(request_of(source, tmp_path / "out"))
    assert mentions(summary.remarks, "layer_norm_epsilon = 1e-05")
    reader = FTReader(summary.ft_dir)
    assert reader.config.architecture().layernorm_eps == 1e-5


def test_decoder_starts_with_padding_where_prompts_were_tuned_so(tmp_path):
    archive = write_prompts(
        tmp_path / "p.nemo", {"boolq": torch.zeros(3, 20)}, decoder_starts_with_pad=True
    )
    reader = converted(nemo(tmp_path), tmp_path, prompt_checkpoints=(archive,))
    assert ini(reader)["decoder"]["decoder_start_token_id"] == "0"
    assert ini(reader)["encoder"]["prompt_learning_start_id"] == "40"


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_prompt_tables_have_the_type_of_the_folder(stored, tmp_path):
    # NVIDIA's converter keeps the archive's type, which the loader reads as something else.
    table = torch.randn(3, 20).to(stored)
    archive = write_prompts(tmp_path / "p.nemo", {"boolq": table})
    reader = converted(
        nemo(tmp_path), tmp_path, prompt_checkpoints=(archive,), weight_data_type="fp16"
    )
    assert torch.equal(reader.read("model.prompt_table.boolq.weight"), table.half())


def test_a_folder_with_everything_added_is_valid(tmp_path):
    reader = converted(
        nemo(tmp_path),
        tmp_path,
        tp_size=2,
        weight_data_type="bf16",
        ia3_checkpoints=(write_ia3(tmp_path / "i.nemo", ia3_scalers(MODEL), MODEL),),
        adapter_checkpoints=(write_adapter(tmp_path / "a.nemo", adapter_tensors(MODEL), MODEL),),
        prompt_checkpoints=(write_prompts(tmp_path / "p.nemo", {"x": torch.zeros(2, 20)}),),
    )
    assert validate_directory(reader.path) == []


# Changes to both stacks' settings, or to one -> words of the refusal.
CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rotary": ({"position_embedding_type": "rope"}, {}, "position_embedding_type = rope"),
    "squared relu": ({"activation": "squared-relu"}, {}, "activation = squared-relu"),
    "fused gate": ({"activation": "fast-swiglu"}, {}, "activation = fast-swiglu"),
    "other norm": ({"normalization": "scalenorm"}, {}, "normalization = scalenorm"),
    "post-ln": ({"transformer_block_type": "post_ln"}, {}, "transformer_block_type = 'post_ln'"),
    "headscale": ({"headscale": True}, {}, "headscale = True"),
    "cross position bias": (
        {"relative_position_bias_self_attention_only": False},
        {},
        "relative_position_bias_self_attention_only",
    ),
    "biases with rmsnorm": ({"normalization": "rmsnorm"}, {}, "bias = true with normalization"),
    "unequal heads": ({}, {"num_attention_heads": 2}, "num_attention_heads = 4 in the encoder"),
    "unequal norms": ({}, {"normalization": "layernorm1p"}, "normalization = 'layernorm'"),
    "no depth": ({"num_layers": None}, {}, "has no num_layers"),
    "a gate that is not there": ({"activation": "geglu"}, {}, "no second matrix"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_models_that_ft_cannot_express_are_refused(case, tmp_path):
    both, decoder, words = CONFIG_REFUSALS[case]
    config = t5_config(MODEL)
    config["encoder"] |= both
    config["decoder"] |= both | decoder
    assert words in refusal(nemo(tmp_path, config=config), tmp_path)


def test_settings_that_are_off_are_not_refused(tmp_path):
    off = {
        "num_moe_experts": 0, "virtual_pipeline_model_parallel_size": None, "headscale": False,
        "transformer_block_type": None, "normalize_attention_scores": True,
    }  # fmt: skip
    config = t5_config(MODEL)
    config["encoder"] |= off
    config["decoder"] |= off
    assert validate_directory(converted(nemo(tmp_path, config=config), tmp_path).path) == []


def test_stages_without_a_split_are_refused(tmp_path):
    source = nemo(tmp_path, pp=2, split=1, config={"pipeline_model_parallel_split_rank": 0})
    assert "pipeline_model_parallel_split_rank = 0" in refusal(source, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"pipeline_model_parallel_split_rank": "x"}, "pipeline_model_parallel_split_rank = 'x'"),
        ({"encoder": {"num_layers": "two"}}, "num_layers = 'two'"),
        ({"pipeline_model_parallel_split_rank": None}, "split_rank = 0"),
    ],
    ids=["split", "layers", "no split"],
)
def test_a_malformed_division_into_stages_is_named(config, said, tmp_path):
    source = nemo(tmp_path, pp=2, split=1, config=config)
    text = refusal(source, tmp_path)
    assert text.startswith(str(source))
    assert said in text


def test_a_decoder_table_of_its_own_is_refused(tmp_path):
    name = ROOT + "decoder_embedding.word_embeddings.weight"
    tensors = t5_tensors(MODEL)
    same = {**tensors, name: tensors[EMBEDDING].clone()}
    other = {**tensors, name: tensors[EMBEDDING] + 1}
    converted(write_t5(tmp_path / "same.nemo", same, MODEL), tmp_path / "same")
    text = refusal(write_t5(tmp_path / "other.nemo", other, MODEL), tmp_path / "other")
    assert f"{name} differs from {EMBEDDING}" in text


def test_a_head_bias_that_nothing_adds_is_refused(tmp_path):
    model = TinyT5(bias=False, normalization="rmsnorm")
    assert "tokens_head.bias" in refusal(nemo(tmp_path, model), tmp_path)


def test_missing_scalers_are_named(tmp_path):
    scalers = ia3_scalers(MODEL)
    del scalers["decoder.2.inter_key"]
    archive = write_ia3(tmp_path / "ia3.nemo", scalers, MODEL)
    text = refusal(nemo(tmp_path), tmp_path, ia3_checkpoints=(archive,))
    assert "layers.2:inter_key_infused_adapter.scalers is missing" in text


def test_missing_adapters_of_a_whole_stack_are_named(tmp_path):
    adapters = adapter_tensors(MODEL)
    encoder = {name: values for name, values in adapters.items() if name.startswith("encoder")}
    archive = write_adapter(tmp_path / "a.nemo", encoder, MODEL)
    text = refusal(nemo(tmp_path), tmp_path, adapter_checkpoints=(archive,))
    assert "decoder.model.layers.0:adapter_1.module.0.weight is missing" in text


def test_strange_tensors_of_an_archive_are_refused(tmp_path):
    scalers = ia3_scalers(MODEL) | {"encoder.9.mlp": torch.ones(28)}
    archive = write_ia3(tmp_path / "ia3.nemo", scalers, replace(MODEL, encoder_layers=10))
    text = refusal(nemo(tmp_path), tmp_path, ia3_checkpoints=(archive,))
    assert "layers.9:mlp_infused_adapter.scalers" in text


@pytest.mark.parametrize("in_place", [False, True])
def test_archives_of_another_model_are_refused_by_shape(tmp_path, in_place):
    wide = replace(MODEL, inter_size=36)
    archive = write_ia3(tmp_path / "ia3.nemo", ia3_scalers(wide), wide)
    text = refusal(nemo(tmp_path), tmp_path, ia3_checkpoints=(archive,), ia3_in_place=in_place)
    assert f"DenseReluDense.{'wo' if in_place else 'ia3'}.weight" in text
    assert "[36]" in text


def test_archives_trained_on_other_ranks_are_refused(tmp_path):
    archive = write_adapter(tmp_path / "a.nemo", adapter_tensors(MODEL), MODEL, tp=2)
    text = refusal(nemo(tmp_path), tmp_path, adapter_checkpoints=(archive,))
    assert "tensor_model_parallel_size = 2, but the model was trained with 1" in text


@pytest.mark.parametrize(
    "tuning",
    [{"norm_position": "post"}, {"norm_type": "layernorm"}, {"type": "parallel_adapter"}],
    ids=str,
)
def test_other_kinds_of_adapters_are_refused(tuning, tmp_path):
    archive = write_adapter(tmp_path / "a.nemo", adapter_tensors(MODEL), MODEL, tuning=tuning)
    text = refusal(nemo(tmp_path), tmp_path, adapter_checkpoints=(archive,))
    ((key, value),) = tuning.items()
    assert f"adapter_tuning.{key} = {value!r}" in text


def test_adapter_width_has_to_divide(tmp_path):
    archive = write_adapter(tmp_path / "a.nemo", adapter_tensors(MODEL, width=6), MODEL, width=6)
    text = refusal(nemo(tmp_path), tmp_path, adapter_checkpoints=(archive,), tp_size=4)
    assert "does not divide adapter_inter_size=6" in text


def test_only_one_task_can_be_multiplied_in(tmp_path):
    archives = tuple(
        write_ia3(tmp_path / f"{n}.nemo", ia3_scalers(MODEL, seed=n), MODEL) for n in range(2)
    )
    text = refusal(nemo(tmp_path), tmp_path, ia3_checkpoints=archives, ia3_in_place=True)
    assert "2 IA3 archives cannot be multiplied" in text


def test_an_adapter_is_no_ia3_archive(tmp_path):
    archive = write_adapter(tmp_path / "a.nemo", adapter_tensors(MODEL), MODEL)
    text = refusal(nemo(tmp_path), tmp_path, ia3_checkpoints=(archive,))
    assert "adapter_tuning.type = 'linear_adapter' is not an IA3 archive" in text
