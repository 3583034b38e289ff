"""The checkpoints of a training run, and which of them are whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.trained_checkpoints import TrainedCheckpoint, find_checkpoints


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def seen(run: Path) -> list[tuple[int, str, bool]]:
    return [(each.step, each.label, not each.missing) for each in find_checkpoints(run)]


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "later") == []


@pytest.mark.parametrize(
    ("tracked", "whole"), [("200", [True, True]), ("100\n", [True, False]), ("x", [False, False])]
)
def test_megatron_names_the_last_finished_iteration(
    tmp_path: Path, tracked: str, whole: list[bool]
) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000200").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    assert [each[2] for each in seen(tmp_path)] == whole


def test_megatron_without_its_tracker_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "iter_0000100").mkdir()
    (found,) = find_checkpoints(tmp_path)
    assert found.missing == "its number in latest_checkpointed_iteration.txt"


def test_hugging_face_trainers_write_their_state_last(tmp_path: Path) -> None:
    touch(tmp_path / "checkpoint-500" / "model.safetensors")
    touch(tmp_path / "checkpoint-1000" / "model.safetensors")
    touch(tmp_path / "checkpoint-500" / "trainer_state.json")
    (tmp_path / "checkpoint-best").mkdir()
    assert seen(tmp_path) == [(500, "checkpoint-500", True), (1000, "checkpoint-1000", False)]


def test_nemo_marks_what_it_is_writing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    names = ["gpt--val_loss=2.1-step=10-consumed_samples=80.0", "gpt--step=20", "gpt--step=20-last"]
    for name in names:
        (folder / name / "weights").mkdir(parents=True)
    touch(folder / f"{names[1]}-unfinished")
    assert seen(tmp_path) == [(10, names[0], True), (20, names[2], True)]
    touch(folder / f"{names[2]}-unfinished")
    assert [each[2] for each in seen(tmp_path)] == [True, False]


def test_a_nemo_1_checkpoint_is_a_file_of_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "checkpoints"
    first, second = "gpt--step=10.ckpt", "gpt--step=20-last.ckpt"
    touch(*(folder / f"mp_rank_0{rank}" / first for rank in (0, 1)))
    touch(folder / "mp_rank_00" / second, folder / "mp_rank_00" / "gpt--step=10-EMA.ckpt")
    assert find_checkpoints(tmp_path) == [
        TrainedCheckpoint(10, folder, first),
        TrainedCheckpoint(20, folder, second, "mp_rank_01"),
    ]
    assert len(find_checkpoints(tmp_path)[0].files()) == 2
    touch(folder / "gpt--step=10-unfinished")
    assert find_checkpoints(tmp_path)[0].missing == "the removal of gpt--step=10-unfinished"
