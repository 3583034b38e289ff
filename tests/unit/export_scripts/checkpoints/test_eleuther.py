"""Indexing EleutherAI's layer files."""

import contextlib
from pathlib import Path

import pytest
import torch

from export_scripts.checkpoints.eleuther import layer_directory, open_eleuther
from foundations.errors import CheckpointMismatchError
from tests.arrays import loaded


def write_layers(folder: Path, *, ranks: int = 2, numbers: tuple[int, ...] = (2, 3, 4)) -> Path:
    """Write an embedding, transformer layers of the given numbers, a norm and a head."""
    step = folder / "global_step5"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step5\n")
    contents = {0: {"word_embeddings.weight": 0}, 9: {"norm.weight": 90}}
    contents |= {number: {"attention.query_key_value.weight": number} for number in numbers}
    contents[11] = {"final_linear.weight": 110}
    for number, tensors in contents.items():
        for rank in range(ranks):
            values = {key: torch.full((4,), value + rank / 10) for key, value in tensors.items()}
            torch.save(values, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    return step


def test_layers_are_numbered_from_the_first_transformer_file(tmp_path):
    write_layers(tmp_path)
    index = open_eleuther(tmp_path)
    pieces = index.tensors["layers.1.attention.query_key_value.weight"]
    values = [float(loaded(piece)[0]) for piece in pieces]
    assert values == pytest.approx([3.0, 3.1])


def test_norm_and_head_are_found_by_their_keys_whatever_their_numbers(tmp_path):
    write_layers(tmp_path)
    assert {"final.norm.weight", "final.final_linear.weight"} <= set(
        open_eleuther(tmp_path).tensors
    )


def test_a_tensor_with_a_number_for_its_name_is_named_by_it(tmp_path):
    step = write_layers(tmp_path, ranks=1)
    torch.save({7: torch.zeros(1)}, step / "layer_12-model_00-model_states.pt")
    assert "final.7" in open_eleuther(tmp_path).tensors


def test_step_folder_itself_is_accepted(tmp_path):
    step = write_layers(tmp_path)
    assert layer_directory(step) == step
    assert not open_eleuther(step).remarks


@pytest.mark.parametrize(
    ("file", "renamed", "words"),
    [
        ("layer_03-model_01", "lost", r"lacks layer_03-model_01-model_states\.pt"),
        ("layer_02-model_01", "layer_02-model_999999999", "a file of rank 999999999"),
        ("layer_03-model_01", "layer_03-model_99", r"lacks .* and \d+ more$"),
    ],
)
def test_files_of_missing_or_impossible_ranks_are_named(file, renamed, words, tmp_path):
    step = write_layers(tmp_path)
    (step / f"{file}-model_states.pt").rename(step / f"{renamed}-model_states.pt")
    with pytest.raises(CheckpointMismatchError, match=words):
        open_eleuther(step)


@pytest.mark.parametrize(
    ("form", "setting", "words"),
    [
        ({"ranks": 1}, "model_parallel_size: 2", "files of 1 training ranks.*size: 2"),
        ({"numbers": (2, 3)}, "num-layers: 3", "holds 2 transformer layers.*num-layers: 3"),
        ({"numbers": (2, 4)}, "", "lacks the files of layer_03"),
    ],
)
def test_missing_ranks_and_layers_contradict_the_configuration_or_the_rest(
    form, setting, words, tmp_path
):
    write_layers(tmp_path, **form)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "20B.yml").write_text(setting)
    with pytest.raises(CheckpointMismatchError, match=words):
        open_eleuther(tmp_path)


def test_ranks_with_different_keys_are_refused(tmp_path):
    step = write_layers(tmp_path)
    torch.save({"norm.bias": torch.zeros(4)}, step / "layer_09-model_01-model_states.pt")
    with pytest.raises(
        CheckpointMismatchError, match=r"tensor rank 0 of stage 0 lacks final\.norm\.bias"
    ):
        open_eleuther(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"), [("a: [", "is not YAML"), ("- a", "is not a table"), ("# empty", "")]
)
def test_configuration_that_is_not_a_table_is_refused(text, reason, tmp_path):
    write_layers(tmp_path)
    path = tmp_path / "configs" / "20B.yml"
    path.parent.mkdir()
    path.write_text(text)
    refused = pytest.raises(CheckpointMismatchError, match=f"{path} {reason}")
    with refused if reason else contextlib.nullcontext():
        open_eleuther(tmp_path)


def test_layers_of_bloom_are_named(tmp_path):
    layer = {"self_attention.query_key_value.weight": torch.ones(6, 2)}
    torch.save(layer, tmp_path / "layer_03-model_00-model_states.pt")
    with pytest.raises(CheckpointMismatchError, match="GPT or BLOOM"):
        open_eleuther(tmp_path)
