"""GPT-NeoX from Hugging Face and from EleutherAI's layer files."""

import shutil
from pathlib import Path

import pytest
import torch

from export_scripts.ft.validation import validate_directory
from tests.conversions import converted, problems_of, remarks_of
from tests.tiny_huggingface import copy_of, read_tensors

BIAS_SUM = "model.layers.0.mlp.attention.bias.sum"


@pytest.fixture
def parallel(shared: Path) -> Path:
    return shared / "golden/gptneox/parallel_residual/source"


@pytest.fixture
def release(shared: Path, tmp_path) -> Path:
    source = tmp_path / "source"
    shutil.copytree(shared / "golden/gptneox_eleuther/train_tp2/source", source)
    return source


def test_a_folder_without_the_biases_that_no_loader_reads_is_complete(parallel, tmp_path):
    folder = converted(parallel, tmp_path).path
    whole, lost = (folder / f"model.layers.{n}.attention.dense.bias.bin" for n in (0, 1))
    (folder.parent / f"{folder.name}.manifest.json").unlink()
    lost.unlink()
    assert validate_directory(folder) == []
    whole.write_bytes(b"short")
    assert validate_directory(folder) == [f"{whole.name} has 5 bytes, expected 128"]


def test_the_name_of_the_head_in_either_version_is_known(parallel, tmp_path):
    head = read_tensors(parallel)["embed_out.weight"]
    source = copy_of(
        parallel, tmp_path / "s", tensors={"embed_out.weight": None, "lm_head.weight": head}
    )
    assert torch.equal(converted(source, tmp_path).read("model.lm_head.weight"), head)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rotary_emb_base": 500, "rope_theta": 500}, "base 500 cannot be represented"),
        ({"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "two spellings of one setting"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "kind linear"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn rotary scaling without factor"),
        ({"hidden_act": "relu"}, "hidden_act = relu cannot be represented"),
    ],
)
def test_settings_that_the_runtime_lacks_are_refused(parallel, tmp_path, settings, words):
    source = copy_of(parallel, tmp_path / "s", config=settings)
    assert words in problems_of(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("settings", "data_type", "warned"),
    [
        ({"torch_dtype": "bfloat16"}, "fp16", True),
        ({"torch_dtype": "bfloat16"}, "bf16", False),
        ({"torch_dtype": "float16"}, "fp16", False),
        ({"dtype": "bfloat16"}, "fp16", True),
    ],
)
def test_fp16_weights_of_a_model_trained_in_bf16_are_warned_about(
    parallel, tmp_path, settings, data_type, warned
):
    source = copy_of(parallel, tmp_path / "s", config=settings)
    assert (
        "trained in bf16" in remarks_of(source, tmp_path / "out", weight_data_type=data_type)
    ) is warned


def test_sizes_of_layer_files_are_read_from_their_tensors(release, tmp_path):
    config = converted(release, tmp_path / "out").config
    sizes = (config.head_num, config.size_per_head, config.num_layer, config.inter_size)
    assert sizes == (4, 8, 2, 88)  # the reference writes 64, 96, 44, 24576 for every model
    assert config.vocab_size == 136
    assert config.rotary_embedding == 8  # two per stored frequency


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", (True, False)),  # the release's own file leaves out what GPT-NeoX-20B has
        ("pos-emb: rotary\n", (False, True)),  # a training run's has the library's defaults
        ("pos-emb: rotary\ngpt-j-residual: true\nbias-gelu-fusion: true\n", (True, False)),
    ],
)
def test_absent_settings_of_layer_files_have_the_defaults_of_their_kind_of_file(
    release, tmp_path, lines, expected
):
    with (release / "configs/20B.yml").open("a") as file:
        file.write(lines)
    config = converted(release, tmp_path / "out").config
    assert (config.use_gptj_residual, config.exact_gelu) == expected


def test_settings_of_layer_files_are_read_in_either_spelling(release, tmp_path):
    with (release / "configs/20B.yml").open("a") as file:
        file.write("gpt_j_residual: false\nlayernorm-epsilon: 0.001\n")
    reader = converted(release, tmp_path / "out", tp_size=2)
    assert not reader.config.use_gptj_residual
    assert reader.config.layernorm_eps == 0.001
    assert reader.has("model.layers.0.attention.dense.bias")


def test_an_assumed_residual_is_reported(release, tmp_path):
    assert "gpt-j-residual" in remarks_of(release, tmp_path / "out")


def layer_file(release: Path, rank: int) -> Path:
    return release / f"global_step100/layer_02-model_{rank:02d}-model_states.pt"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_output_biases_of_training_ranks_are_summed(release, tmp_path, tp_size):
    ranks = [torch.load(layer_file(release, rank), weights_only=True) for rank in (0, 1)]
    total = sum(
        rank[name].float()
        for rank in ranks
        for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")
    )
    found = converted(release, tmp_path / "out", tp_size=tp_size).read(BIAS_SUM)
    # The reference stores one rank's bias when both parallel sizes are 2 or more.
    torch.testing.assert_close(found * tp_size, total)


def test_norms_of_training_ranks_are_averaged(release, tmp_path):
    rank = torch.load(layer_file(release, 1), weights_only=True)
    name = "input_layernorm.weight"
    before = rank[name].float()
    rank[name] = rank[name] + 1
    torch.save(rank, layer_file(release, 1))
    found = converted(release, tmp_path / "out").read(f"model.layers.0.{name}")
    torch.testing.assert_close(found, before + 0.5, rtol=0, atol=1e-2)  # fp16 source


def test_unknown_rotary_dimensions_are_asked_for(release, tmp_path):
    for file in release.glob("global_step100/layer_0[23]-*"):
        state = torch.load(file, weights_only=True)
        del state["attention.rotary_emb.inv_freq"]
        torch.save(state, file)
    assert "state --set rotary_embedding=.." in problems_of(release, tmp_path / "out")
    given = (("rotary_embedding", "6"),)
    assert converted(release, tmp_path / "out", given=given).config.rotary_embedding == 6


def test_other_architectures_in_layer_files_are_refused(release, tmp_path):
    with (release / "configs/20B.yml").open("a") as file:
        file.write("pos-emb: alibi\nnorm: rmsnorm\n")
    problems = problems_of(release, tmp_path / "o")
    assert "pos-emb = 'alibi'" in problems
    assert "norm = 'rmsnorm'" in problems


@pytest.mark.parametrize("dims", ["7", "-2", "1000"])
def test_stated_rotary_dimensions_that_a_head_lacks_are_refused(release, tmp_path, dims):
    assert f"rotary_embedding = {dims} is not an even number" in problems_of(
        release, tmp_path / "out", given=(("rotary_embedding", dims),)
    )
