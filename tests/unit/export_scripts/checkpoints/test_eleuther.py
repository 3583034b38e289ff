"""Indexing EleutherAI's layer files."""

from __future__ import annotations

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


def test_layers_are_numbered_from_the_first_transformer_file(tmp_path: Path) -> None:
    write_layers(tmp_path)
    index = open_eleuther(tmp_path)
    pieces = index.tensors["layers.1.attention.query_key_value.weight"]
    values = [float(loaded(piece)[0]) for piece in pieces]
    assert values == pytest.approx([3.0, 3.1])


def test_norm_and_head_are_found_by_their_keys_whatever_their_numbers(tmp_path: Path) -> None:
    write_layers(tmp_path)
    assert {"final.norm.weight", "final.final_linear.weight"} <= set(
        open_eleuther(tmp_path).tensors
    )


def test_a_tensor_with_a_number_for_its_name_is_named_by_it(tmp_path: Path) -> None:
    step = write_layers(tmp_path, ranks=1)
    torch.save({7: torch.zeros(1)}, step / "layer_12-model_00-model_states.pt")
    assert "final.7" in open_eleuther(tmp_path).tensors


def test_step_folder_itself_is_accepted(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    assert layer_directory(step) == step
    assert not open_eleuther(step).remarks


def test_missing_rank_is_named(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    (step / "layer_03-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointMismatchError, match=r"lacks layer_03-model_01-model_states\.pt"):
        open_eleuther(tmp_path)


def test_rank_missing_everywhere_contradicts_the_configuration(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "20B.yml").write_text("model_parallel_size: 2\n")
    for file in step.glob("*-model_01-*"):
        file.unlink()
    with pytest.raises(CheckpointMismatchError, match=r"files of 1 training ranks.*size: 2"):
        open_eleuther(tmp_path)


def test_a_rank_that_no_run_has_is_refused(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    (step / "layer_02-model_999999999-model_states.pt").write_bytes(b"x")
    with pytest.raises(CheckpointMismatchError, match="a file of rank 999999999"):
        open_eleuther(step)


def test_many_missing_ranks_are_counted(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    file = step / "layer_03-model_01-model_states.pt"
    file.rename(step / "layer_03-model_99-model_states.pt")
    with pytest.raises(CheckpointMismatchError, match=r"lacks .* and \d+ more$"):
        open_eleuther(step)


def test_missing_layer_is_named(tmp_path: Path) -> None:
    write_layers(tmp_path, numbers=(2, 4))
    with pytest.raises(CheckpointMismatchError, match="lacks the files of layer_03"):
        open_eleuther(tmp_path)


def test_missing_last_layer_contradicts_the_configuration(tmp_path: Path) -> None:
    write_layers(tmp_path, numbers=(2, 3))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "20B.yml").write_text("num-layers: 3\n")
    with pytest.raises(CheckpointMismatchError, match=r"holds 2 transformer layers.*num-layers: 3"):
        open_eleuther(tmp_path)


def test_ranks_with_different_keys_are_refused(tmp_path: Path) -> None:
    step = write_layers(tmp_path)
    torch.save({"norm.bias": torch.zeros(4)}, step / "layer_09-model_01-model_states.pt")
    with pytest.raises(
        CheckpointMismatchError, match=r"tensor rank 0 of stage 0 lacks final\.norm\.bias"
    ):
        open_eleuther(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"), [("a: [", "is not YAML"), ("- a", "is not a table"), ("# empty", "")]
)
def test_configuration_that_is_not_a_table_is_refused(
    text: str, reason: str, tmp_path: Path
) -> None:
    write_layers(tmp_path)
    path = tmp_path / "configs" / "20B.yml"
    path.parent.mkdir()
    path.write_text(text)
    refused = pytest.raises(CheckpointMismatchError, match=f"{path} {reason}")
    with refused if reason else contextlib.nullcontext():
        open_eleuther(tmp_path)


def test_layers_of_bloom_are_named(tmp_path: Path) -> None:
    layer = {"self_attention.query_key_value.weight": torch.ones(6, 2)}
    torch.save(layer, tmp_path / "layer_03-model_00-model_states.pt")
    with pytest.raises(CheckpointMismatchError, match="GPT or BLOOM"):
        open_eleuther(tmp_path)
