"""Variants of GPT sources that no golden holds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.families.gpt.megatron import core_traits
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.reader import FTReader
from tests.conversions import converted, folder_of, problems_of
from tests.json_files import write_json
from tests.looks import mentions
from tests.tiny import (
    NEMO,
    TinyGPT,
    gpt_tensors,
    nemo_members,
    write_megatron,
    write_nemo,
)
from tests.tiny_huggingface import renamed

MODEL = TinyGPT()
LAYER = NEMO + "encoder.layers.{}."


def test_layernorm1p_scales_get_one_added(tmp_path):
    tensors = gpt_tensors()
    source = write_nemo(tmp_path / "x.nemo", config={"normalization": "layernorm1p"})
    ft = converted(source, tmp_path)
    stored = tensors[LAYER.format(1) + "input_layernorm.weight"]
    assert torch.equal(ft.read("model.layers.1.input_layernorm.weight"), stored + 1)
    final = tensors[NEMO + "encoder.final_layernorm.weight"]
    assert torch.equal(ft.read("model.final_layernorm.weight"), final + 1)
    bias = tensors[LAYER.format(1) + "input_layernorm.bias"]
    assert torch.equal(ft.read("model.layers.1.input_layernorm.bias"), bias)


def test_a_legacy_model_of_nemo_keeps_all_queries_before_the_keys(tmp_path):
    tensors = gpt_tensors()
    legacy = {
        name: value.unflatten(0, (MODEL.head_num, 3, -1)).transpose(0, 1).flatten(0, 2)
        if "query_key_value" in name
        else value
        for name, value in tensors.items()
    }
    plain = converted(write_nemo(tmp_path / "x.nemo"), tmp_path / "plain")
    source = write_nemo(tmp_path / "y.nemo", legacy, config={"megatron_legacy": True})
    found = converted(source, tmp_path / "legacy")
    name = "model.layers.1.attention.query_key_value."
    for kind in ("weight", "bias"):
        assert torch.equal(found.read(name + kind), plain.read(name + kind))


def test_models_without_biases_get_zero_files(tmp_path):
    tensors = {
        name: tensor
        for name, tensor in gpt_tensors().items()
        if not name.endswith(".bias") or "layernorm" in name
    }
    source = write_nemo(tmp_path / "x.nemo", tensors, config={"bias": False})
    ft = converted(source, tmp_path, tp_size=2)
    for name in ("attention.query_key_value", "attention.dense", "mlp.dense_4h_to_h"):
        bias = ft.read(f"model.layers.2.{name}.bias")
        assert not bias.any()
    norm = tensors[LAYER.format(2) + "input_layernorm.bias"]
    assert torch.equal(ft.read("model.layers.2.input_layernorm.bias"), norm)


def test_an_untied_output_layer_becomes_the_head(tmp_path):
    head = torch.randn(MODEL.vocab_size, MODEL.hidden)
    tensors = gpt_tensors() | {NEMO + "output_layer.weight": head}
    config = {"share_embeddings_and_output_weights": False}
    ft = converted(write_nemo(tmp_path / "x.nemo", tensors, tp=2, pp=2, config=config), tmp_path)
    assert torch.equal(ft.read("model.lm_head.weight"), head)
    assert ft.config.architecture().untied_head


def test_a_tied_model_writes_no_head(tmp_path):
    ft = converted(write_nemo(tmp_path / "x.nemo"), tmp_path)
    assert not ft.has("model.lm_head.weight")
    assert not ft.config.architecture().untied_head


def test_a_lost_head_is_noticed(tmp_path):
    head = torch.randn(MODEL.vocab_size, MODEL.hidden)
    tensors = gpt_tensors() | {NEMO + "output_layer.weight": head}
    ft = converted(write_nemo(tmp_path / "x.nemo", tensors), tmp_path)
    (ft.path / "model.lm_head.weight.bin").unlink()
    with pytest.raises(ValueError, match=r"model\.lm_head\.weight\.bin is missing"):
        FTReader(ft.path)


def test_a_head_that_is_neither_stored_nor_tied_is_missing(tmp_path):
    config = {"share_embeddings_and_output_weights": False}
    source = write_nemo(tmp_path / "x.nemo", config=config)
    with pytest.raises(ValueError, match=r"output_layer\.weight is missing"):
        converted(source, tmp_path)


def test_tokenizer_files_of_the_archive_a_run_began_with_may_be_absent(tmp_path):
    members = nemo_members(gpt_tensors())
    run = tmp_path / "run"
    run.mkdir()
    for name in ("model_config.yaml", "model_weights.ckpt"):
        (run / name).write_bytes(members[name])
    assert converted(run, tmp_path, given=(("end_id", "5"),)).config.end_id == 5


def test_the_last_stage_copy_of_the_embedding_is_ignored(tmp_path):
    tensors = gpt_tensors()
    tensors["model.word_embeddings.weight"] = tensors[NEMO + "embedding.word_embeddings.weight"]
    assert converted(write_nemo(tmp_path / "x.nemo", tensors, pp=2), tmp_path).config.end_id == 52


@pytest.mark.parametrize(
    ("version", "order", "stack", "attention"),
    [
        (0, ("k", "n", "d"), "transformer", "attention"),
        (1.0, ("n", "d", "k"), "encoder", "attention"),
        (2.0, ("n", "k", "d"), "encoder", "self_attention"),
        (3.0, ("n", "k", "d"), "encoder", "self_attention"),
    ],
)
def test_qkv_rows_of_each_checkpoint_version_come_out_alike(
    tmp_path, version, order, stack, attention
):
    tensors = gpt_tensors()
    expected = converted(write_nemo(tmp_path / "x.nemo"), tmp_path)
    sizes = {"n": MODEL.head_num, "k": 3, "d": MODEL.size_per_head}
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            axes = ["nkd".index(axis) for axis in order]
            split = tensor.view(sizes["n"], 3, sizes["d"], *tensor.shape[1:])
            tail = [3] if tensor.ndim == 2 else []
            tensors[name] = split.permute(*axes, *tail).reshape(tensor.shape).contiguous()
    source = write_megatron(
        tmp_path / "m", tensors, version=version, stack=stack, attention=attention
    )
    given = (("head_num", "6"),) if version == 0 else ()
    ft = converted(source, tmp_path / "o", given=given)
    for layer in range(MODEL.num_layer):
        for part in ("weight", "bias"):
            name = f"model.layers.{layer}.attention.query_key_value.{part}"
            assert torch.equal(ft.read(name), expected.read(name))


def test_version_0_asks_for_its_heads(tmp_path):
    source = write_megatron(tmp_path / "m", gpt_tensors(), version=0, stack="transformer")
    with pytest.raises(ValueError, match="state --set head_num="):
        folder_of(source, tmp_path / "o")


def test_version_0_counts_the_rows_of_every_training_rank(tmp_path):
    """Its files hold no vocabulary size; the reference sums the ranks of one group only."""
    tensors = gpt_tensors()
    source = write_megatron(tmp_path / "m", tensors, version=0, stack="transformer", tp=2)
    given = (("head_num", "6"),)
    ft = converted(source, tmp_path / "o", given=given)
    assert ft.config.dim("vocab_size", {}) == MODEL.vocab_size
    assert torch.equal(ft.read("model.wte"), tensors[NEMO + "embedding.word_embeddings.weight"])


def test_megatron_rank_folders_in_nemo_s_style_are_read(tmp_path):
    source = write_megatron(tmp_path / "m", gpt_tensors(), tp=2, pp=2)
    for folder in list(source.glob("mp_rank_*")):
        t, p = folder.name.removeprefix("mp_rank_").split("_")
        folder.rename(source / f"tp_rank_{t}_pp_rank_{p}")
    expected = converted(write_nemo(tmp_path / "x.nemo"), tmp_path)
    ft = converted(source, tmp_path / "o")
    name = "model.layers.3.mlp.dense_4h_to_h.weight"
    assert torch.equal(ft.read(name), expected.read(name))


def test_an_unknown_checkpoint_version_is_refused(tmp_path):
    source = write_megatron(tmp_path / "m", gpt_tensors(), version=4.0)
    with pytest.raises(ValueError, match=r"checkpoint_version = 4\.0; known versions: 0, 1, 2, 3"):
        folder_of(source, tmp_path / "o")


def test_the_latest_iteration_of_a_megatron_run_is_followed(tmp_path):
    write_megatron(tmp_path / "m" / "iter_0000100", gpt_tensors(seed=1))
    write_megatron(tmp_path / "m" / "iter_0000200", gpt_tensors(seed=2))
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("200")
    request = ConversionRequest(tmp_path / "m", tmp_path / "o", 1, "fp32")
    summary = convert(request)
    wte = FTReader(summary.ft_dir).read("model.wte")
    assert torch.equal(wte, gpt_tensors(seed=2)[NEMO + "embedding.word_embeddings.weight"])
    assert mentions(summary.remarks, "iter_0000200")


# Part of a name -> the same in megatron-core, whose own layers keep the norms apart.
CORE = {
    "query_key_value": "linear_qkv", "self_attention.dense": "self_attention.linear_proj",
    "dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2",
    "post_attention_layernorm": "pre_mlp_layernorm", NEMO + "encoder.": "model.decoder.",
    NEMO: "model.",
}  # fmt: skip


@pytest.mark.parametrize(("same", "untied"), [(True, False), (False, True)])
def test_a_stored_output_layer_of_a_tied_core_model_is_compared(tmp_path, same, untied):
    tensors = renamed(gpt_tensors(), CORE)
    embedding = tensors["model.embedding.word_embeddings.weight"]
    tensors["model.output_layer.weight"] = embedding.clone() if same else embedding + 1
    source = write_nemo(tmp_path / "core.nemo", tensors, config={"mcore_gpt": True})
    ft = converted(source, tmp_path)
    assert ft.has("model.lm_head.weight") is untied


def test_special_tokens_can_be_stated(tmp_path):
    source = write_nemo(tmp_path / "x.nemo")
    ft = converted(source, tmp_path, given=(("start_id", "1"), ("end_id", "7")))
    assert (ft.config.start_id, ft.config.end_id) == (1, 7)


def test_a_missing_unknown_tokenizer_asks_for_ids(tmp_path):
    tokenizer = {"library": "sentencepiece", "type": None, "model": None}
    source = write_nemo(tmp_path / "x.nemo", config={"tokenizer": tokenizer})
    with pytest.raises(ValueError, match="start_id and end_id are unknown"):
        converted(source, tmp_path)


def test_given_tokenizer_files_take_the_place_of_the_archive_s(tmp_path):
    vocab = tmp_path / "my-vocab.json"
    write_json(vocab, {"<|endoftext|>": 9})
    ft = converted(write_nemo(tmp_path / "x.nemo"), tmp_path, vocab_path=vocab)
    assert ft.config.end_id == 9
    assert (ft.path / "vocab.json").read_bytes() == vocab.read_bytes()
    assert (ft.path / "merges.txt").exists()


def test_given_tokenizer_of_any_name_is_the_only_one_of_the_folder(tmp_path):
    given = tmp_path / "20B_tokenizer.json"
    write_json(given, {"version": "1.0", "model": {"type": "BPE", "vocab": {}}})
    ids = (("start_id", "0"), ("end_id", "0"))
    folder = converted(write_nemo(tmp_path / "x.nemo"), tmp_path, vocab_path=given, given=ids).path
    assert (folder / "tokenizer.json").read_bytes() == given.read_bytes()
    assert [name for name in ("vocab.json", "merges.txt") if (folder / name).exists()] == []


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[1]"])
def test_given_file_that_is_not_a_table_is_refused_by_name(text, tmp_path):
    given = tmp_path / "my-vocab.json"
    given.write_text(text)
    with pytest.raises(ValueError, match=r"my-vocab\.json"):
        converted(write_nemo(tmp_path / "x.nemo"), tmp_path, vocab_path=given)


def test_prompt_tables_are_cast_to_the_folder_s_type(shared, tmp_path):
    case = shared / "golden/gpt_nemo/prompt_table/source"
    folder = folder_of(
        case / "megatron_gpt.nemo",
        tmp_path,
        weight_data_type="fp16",
        prompt_checkpoints=(case / "prompt.nemo",),
    )
    _, config = read_config(folder)
    assert [(t.task_name, t.prompt_length) for t in config.tasks] == [
        ("sentiment", 4), ("intent_and_slot", 7),
    ]  # fmt: skip
    size = (folder / "model.prompt_table.sentiment.weight.bin").stat().st_size
    assert size == 4 * 32 * np.dtype(np.float16).itemsize


def test_the_same_task_from_two_archives_is_refused(shared, tmp_path):
    case = shared / "golden/gpt_nemo/prompt_table/source"
    prompt = case / "prompt.nemo"
    with pytest.raises(ValueError, match="was already added"):
        folder_of(case / "megatron_gpt.nemo", tmp_path, prompt_checkpoints=(prompt, prompt))


@pytest.mark.parametrize(
    ("config", "exact"),
    [
        ({}, False),
        ({"bias_activation_fusion": False}, True),
        ({"bias_gelu_fusion": False}, True),
        ({"bias_activation_fusion": False, "openai_gelu": True}, False),
        ({"bias_activation_fusion": False, "activation": "openai-gelu"}, False),
        ({"bias_activation_fusion": False, "activation": "relu"}, False),
    ],
)
def test_gelu_of_nemo_is_by_erf_unless_it_is_fused(tmp_path, config, exact):
    source = write_nemo(tmp_path / "x.nemo", config=config)
    folder = folder_of(source, tmp_path / "o")
    assert f"exact_gelu = {exact}" in (folder / "config.ini").read_text()


@pytest.mark.parametrize(
    ("args", "exact"),
    [({}, False), ({"bias_gelu_fusion": False}, True), ({"bias_gelu_fusion": True}, False)],
)
def test_gelu_of_megatron_is_by_erf_unless_it_is_fused(tmp_path, args, exact):
    source = write_megatron(tmp_path / "m", gpt_tensors(), args=args)
    folder = folder_of(source, tmp_path / "o")
    assert f"exact_gelu = {exact}" in (folder / "config.ini").read_text()


@pytest.mark.parametrize(
    ("args", "exact"),
    [({}, False), ({"bias_gelu_fusion": False}, True), ({"bias_gelu_fusion": True}, False)],
)
def test_megatron_core_passes_over_openai_gelu(args, exact):
    reader = SimpleNamespace(format="megatron", is_distributed=True)
    config = {"openai_gelu": True, "num_attention_heads": 4, "hidden_size": 16} | args
    facts: Any = SimpleNamespace(reader=reader, config=config)
    assert core_traits(facts).exact_gelu is exact


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"apply_embedding_scaling": True}, "the embedding is multiplied by sqrt(hidden_size)"),
        ({"drop_layers": [1]}, "drop_layers = [1]: layers are skipped"),
        ({"softmax_scale": 0.5}, "scores are divided by another number"),
        ({"window_size": [4, 0]}, "window_size = [4, 0]: attention has a window"),
    ],
)
def test_settings_that_no_tensor_shows_are_refused(tmp_path, config, words):
    source = write_nemo(tmp_path / "x.nemo", config=config)
    assert words in problems_of(source, tmp_path / "o")


@pytest.mark.parametrize("flag", ["squared_relu", "quick_geglu"])
def test_activations_of_megatron_that_ft_lacks_are_refused(tmp_path, flag):
    source = write_megatron(tmp_path / "m", gpt_tensors(), args={flag: True})
    assert "activation" in problems_of(source, tmp_path / "o")
