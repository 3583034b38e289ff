"""Mistyped values, absent files and odd destinations are reported in the user's own words."""

import io

import pytest
import torch

from export_scripts.conversion.convert import convert
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of, problems_of, remarks_of, request_of
from tests.tiny import TinyGPT, gpt_tensors, nemo_config, nemo_members, write_megatron, write_nemo
from tests.tiny_huggingface import copy_of
from tests.tiny_transformers import write_model


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"num_layers": "4x"}, "num_layers = '4x' is not a count"),
        ({"hidden_size": 30.5}, "hidden_size = 30.5 is not a count"),
        ({"layernorm_epsilon": "small"}, "layernorm_epsilon = 'small' is out of range"),
        ({"num_attention_heads": [6]}, "num_attention_heads = [6] is not a count"),
        (
            {"num_layers": 10**9},
            "num_layers = 1000000000 is not a count; expected a whole number from 0 to 10000",
        ),
        ({"tensor_model_parallel_size": 10**9}, "expected at most 100000 training ranks"),
        ({"pipeline_model_parallel_size": 10**9}, "expected at most 100000 training ranks"),
    ],
)
def test_sizes_that_are_no_sizes_are_reported(tmp_path, config, reported):
    """Once, and without a list of the tensors of absurdly many layers."""
    source = write_nemo(tmp_path / "x.nemo", config=config)
    (problem,) = problems_of(source, tmp_path / "out").splitlines()
    assert problem.startswith(f"--checkpoint-path={source}")
    assert reported in problem


def test_an_epsilon_without_a_point_is_read_as_a_number(tmp_path):
    source = write_nemo(tmp_path / "x.nemo", config={"layernorm_epsilon": "1e-3"})
    assert (
        "layernorm_eps = 0.001" in (folder_of(source, tmp_path / "out") / "config.ini").read_text()
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gptj", "transformer.h.1.attn.k_proj.weight"),
        ("t5", "decoder.block.0.layer.0.SelfAttention.v.weight"),
        ("opt", "model.decoder.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_every_part_of_a_fused_matrix_has_its_shape(name, key, tmp_path):
    """Not the first one alone."""
    model = write_model(name, tmp_path / "model")
    bad = copy_of(model, tmp_path / "bad", tensors={key: torch.zeros(3, 5)})
    problem = problems_of(bad, tmp_path / "out")
    assert f"{key} [3, 5]" in problem
    assert "do not fit together" in problem


def test_every_rank_stores_floating_numbers(tmp_path):
    source = write_megatron(tmp_path / "m", gpt_tensors(TinyGPT()), tp=2)
    file = source / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    embedding = state["model"]["language_model"]["embedding"]["word_embeddings"]
    embedding["weight"] = embedding["weight"].long()
    torch.save(state, file)
    problem = problems_of(source, tmp_path / "out")
    assert "word_embeddings.weight is stored as int64, expected a floating type" in problem


@pytest.mark.parametrize(
    ("key", "shape"), [("word_embeddings", (54,)), ("position_embeddings", ()), ("position", None)]
)
def test_tables_that_give_no_size_are_reported(tmp_path, key, shape):
    """Megatron-LM's version 0 states no sizes."""
    tensors = gpt_tensors(TinyGPT())
    source = write_megatron(tmp_path / "m", tensors, version=0)
    file = next(source.rglob("*.pt"))
    state = torch.load(file, weights_only=False)
    embedding = state["model"]["language_model"]["embedding"]
    name = next(each for each in embedding if each.startswith(key))
    if shape is None:
        del embedding[name]
    else:
        embedding[name]["weight"] = torch.zeros(shape)
    file.unlink()
    torch.save(state, file)
    problem = problems_of(source, tmp_path / "out", given=(("head_num", "6"),))
    assert problem.startswith(f"--checkpoint-path={source}: language_model.embedding.{name}.weight")


@pytest.mark.parametrize(
    ("args", "reported"),
    [
        ({"tensor_model_parallel_size": "2"}, "tensor_model_parallel_size is '2'; expected"),
        ({"num_layers": 2.5}, "num_layers = 2.5 is not a count"),
        ({"project_size": [3]}, "project_size = [3] is not a count"),
    ],
)
def test_sizes_in_megatron_arguments_that_are_no_sizes_are_reported(tmp_path, args, reported):
    source = write_megatron(tmp_path / "m", gpt_tensors(), pp=2, args=args)
    (problem,) = problems_of(source, tmp_path / "out").splitlines()
    assert reported in problem


def test_added_files_that_do_not_exist_are_named_with_their_options(tmp_path):
    problems = problems_of(
        write_nemo(tmp_path / "x.nemo"),
        tmp_path / "out",
        prompt_checkpoints=(tmp_path / "p",),
        vocab_path=tmp_path / "v",
    )
    remedy = "check the spelling, and that this machine sees it"
    assert problems.splitlines() == [
        f"--prompt-checkpoint={tmp_path / 'p'} does not exist; {remedy}",
        f"--vocab-path={tmp_path / 'v'} does not exist; {remedy}",
    ]


def test_unreadable_stated_values_are_all_reported(tmp_path):
    given = (("start_id", "abc"), ("layernorm_eps", "x"), ("tensor_para_size", "2"))
    problems = problems_of(write_nemo(tmp_path / "x.nemo"), tmp_path / "out", given=given)
    assert problems.splitlines() == [
        "--set start_id=abc: 'abc' is not an integer",
        "--set layernorm_eps=x: 'x' is not a number",
        "--set tensor_para_size=2: use --tensor-model-parallel-size",
    ]


def test_an_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    source = write_nemo(tmp_path / "x.nemo")
    assert problems_of(source, tmp_path / "file" / "out") == (
        f"--output-dir={tmp_path / 'file' / 'out'}: {tmp_path / 'file'} is not a folder; choose "
        "another place"
    )


def test_a_refused_conversion_leaves_no_folder_it_made(tmp_path):
    source = write_nemo(tmp_path / "x.nemo")
    with pytest.raises(CheckpointMismatchError):
        folder_of(source, tmp_path / "new" / "out", tp_size=5)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("as_link", [False, True])
def test_overwriting_replaces_a_file_or_link_in_the_way(tmp_path, as_link):
    source = write_nemo(tmp_path / "x.nemo")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    place = tmp_path / "out" / "1-gpu"
    place.parent.mkdir()
    if as_link:
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.touch()
    folder_of(source, tmp_path / "out", overwrite=True)
    assert (place / "config.ini").is_file()
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_a_missing_tensor_is_reported_with_the_remedy(tmp_path):
    tensors = {k: v for k, v in gpt_tensors().items() if "layers.1.input_layernorm" not in k}
    source = write_nemo(tmp_path / "x.nemo", tensors)
    assert "fetch the checkpoint again" in problems_of(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("gpt-b-last.ckpt", "gpt-a-last.ckpt"),
        ("gpt-step=9-last.ckpt", "gpt-step=10-last.ckpt"),
        ("last.ckpt", "last-v1.ckpt"),
    ],
)
def test_the_newest_of_several_last_checkpoints_is_taken(tmp_path, older, newer):
    source = tmp_path / "checkpoints"
    source.mkdir()
    members = nemo_members(gpt_tensors())
    weights = members.pop("model_weights.ckpt")
    for name, data in members.items():
        (source / name).write_bytes(data)
    state = torch.load(io.BytesIO(weights), weights_only=True)
    for step, name, scale in ((9, older, 2.0), (10, newer, 1.0)):
        content = {"global_step": step, "state_dict": {k: v * scale for k, v in state.items()}}
        torch.save(content, source / name)
    done = convert(request_of(source, tmp_path / "out"))
    expected = gpt_tensors()["model.language_model.encoder.final_layernorm.bias"]
    found = FTReader(done.ft_dir).read("model.final_layernorm.bias")
    assert torch.equal(found, expected)
    assert "of step 10, the newest of several" in done.remarks[0]


def test_averaged_weights_that_are_left_are_reported(tmp_path):
    source = tmp_path / "checkpoints"
    source.mkdir()
    content = {"state_dict": gpt_tensors(), "hyper_parameters": {"cfg": nemo_config()}}
    torch.save(content, source / "gpt-step=9-last-EMA.ckpt")
    assert "name one of gpt-step=9-last-EMA.ckpt" in problems_of(source, tmp_path / "out")
    torch.save(content, source / "gpt-step=9-last.ckpt")
    remarks = remarks_of(source, tmp_path / "out")
    assert remarks.startswith("left gpt-step=9-last-EMA.ckpt")


@pytest.mark.parametrize(
    ("of", "key", "value"),
    [("nemo", "end_id", 50256), ("nemo", "end_id", -1), ("t5", "eos_token_id", 1 << 20)],
)
def test_tokens_outside_the_vocabulary_are_named_as_the_family_names_them(tmp_path, of, key, value):
    if of == "nemo":
        given = (("start_id", "0"), (key, str(value)))
        remarks = remarks_of(write_nemo(tmp_path / "x.nemo"), tmp_path / "out", given=given)
    else:
        t5 = write_model("t5", tmp_path / "t5")
        source = copy_of(t5, tmp_path / "source", config={key: value})
        remarks = remarks_of(source, tmp_path / "out")
    (remark,) = (each for each in remarks.splitlines() if "outside the vocabulary" in each)
    assert remark.startswith(f"{key} = {value} is outside the vocabulary of ")
    assert f"--set {key}=.." in remark


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        ({"model_type": ["llama"]}, "model_type = ['llama'] of its configuration is not a text"),
        ({"model_type": {}}, "model_type = {} of its configuration is not a text"),
        ({"head_dim": 10**400}, "is not a count; expected a whole number from 1 to 2147483647"),
    ],
)
def test_values_that_no_json_of_a_model_has_are_reported(config, reported, tmp_path):
    source = copy_of(write_model("llama", tmp_path / "llama"), tmp_path / "source", config=config)
    assert reported in problems_of(source, tmp_path / "out")
