"""GPT-J from Hugging Face and from the mesh-transformer-jax release."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from tests.conversions import converted, folder_of, problems_of, remarks_of
from tests.json_files import read_json, write_json
from tests.looks import mentions
from tests.tiny_huggingface import copy_of

HEADS = (("head_num", "4"), ("rotary_embedding", "2"))


@pytest.fixture
def hugging_face(shared: Path) -> Path:
    return shared / "golden/gptj_hf/tiny/source"


@pytest.fixture
def release(shared: Path, tmp_path) -> Path:
    source = tmp_path / "source"
    shutil.copytree(shared / "golden/gptj_slim/tiny/source", source)
    return source


def test_rotary_dimensions_that_are_null_are_the_whole_head(hugging_face, tmp_path):
    source = copy_of(hugging_face, tmp_path / "s")
    settings = read_json(source / "config.json")
    write_json(source / "config.json", settings | {"rotary_dim": None})
    assert converted(source, tmp_path).config.rotary_embedding == 8


def test_rotary_dimensions_that_are_absent_are_the_64_of_transformers(hugging_face, tmp_path):
    source = copy_of(hugging_face, tmp_path / "s", config={"rotary_dim": None})
    with pytest.raises(ValueError, match="rotary_dim = 64 is not an even number of at most"):
        converted(source, tmp_path)


def test_another_activation_is_refused(hugging_face, tmp_path):
    source = copy_of(hugging_face, tmp_path / "s", config={"activation_function": "relu"})
    assert "activation_function = relu cannot be represented" in problems_of(
        source, tmp_path / "out"
    )


@pytest.mark.parametrize("dims", [3, 10])
def test_rotary_dimensions_that_a_head_lacks_are_refused(hugging_face, tmp_path, dims):
    source = copy_of(hugging_face, tmp_path / "s", config={"rotary_dim": dims})
    assert f"rotary_dim = {dims} is not an even number" in problems_of(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        ({"n_heads": 0}, "n_heads = 0 is not a count"),
        ({"n_heads": [16]}, "n_heads = [16] is not a count"),
        ({"n_heads": 16, "pe_rotary_dims": 1}, "rotary_embedding (pe_rotary_dims) = 1 is not an"),
        ({"n_heads": 16, "pe": "t5"}, "pe = 't5' cannot be represented"),
    ],
)
def test_a_release_whose_configuration_cannot_be_is_refused(release, tmp_path, reported, words):
    write_json(release / "model.json", reported)
    assert words in problems_of(release / "step_383500", tmp_path / "out")


def edit(release: Path, shard: int, name: str, value: float) -> None:
    """Set the first value of an array of the first part, by its place there."""
    file = release / f"step_383500/shard_{shard}/0.npz"
    with np.load(file) as archive:
        arrays = [archive[key] for key in archive.files]
    place = {"wte.bias": 0, "h.0.ln_1.weight": 11}[name]
    bits = torch.tensor([value]).to(torch.bfloat16).view(torch.int16).numpy()
    arrays[place].view(np.int16)[0] = bits[0]
    np.savez(file, *arrays)


def test_release_without_heads_assumes_those_of_the_6b_model_and_says_so(release, tmp_path):
    remarks = remarks_of(release, tmp_path / "out", tp_size=2)
    assert re.search("head_num = 16.*--set head_num", remarks)


def test_stated_heads_are_taken(release, tmp_path):
    reader = converted(release, tmp_path / "out", tp_size=2, given=HEADS)
    config = reader.config
    assert (config.head_num, config.size_per_head, config.rotary_embedding) == (4, 4, 2)
    assert (config.num_layer, config.vocab_size, config.inter_size) == (28, 48, 64)


def test_model_configuration_next_to_the_release_is_used(release, tmp_path):
    write_json(release / "model.json", {"n_heads": 8, "pe_rotary_dims": 2})
    summary = convert(ConversionRequest(release, tmp_path / "out", 2, "fp32"))
    text = (summary.ft_dir / "config.ini").read_text()
    assert "head_num = 8" in text
    assert not mentions(summary.remarks, "assumed")


@pytest.mark.parametrize(
    ("name", "words"),
    [("wte.bias", "replicated bias differs"), ("h.0.ln_1.weight", "layernorm weight differs")],
)
def test_shards_that_break_the_releases_rule_are_refused(release, tmp_path, name, words):
    edit(release, 3, name, 0.75)
    with pytest.raises(ValueError, match=words):
        folder_of(release, tmp_path / "out", given=HEADS)
    assert not (tmp_path / "out" / "1-gpu").exists()


def test_heads_that_do_not_fit_are_refused(release, tmp_path):
    assert "16 does not divide by 5 heads" in problems_of(
        release, tmp_path / "out", given=(("head_num", "5"),)
    )


def test_shards_missing_at_the_end_are_noticed_by_the_shapes(release, tmp_path):
    for shard in (6, 7):
        shutil.rmtree(release / f"step_383500/shard_{shard}")
    assert "q.weight [16, 2]" in problems_of(release, tmp_path / "out", given=HEADS)
