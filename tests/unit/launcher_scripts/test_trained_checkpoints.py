"""The checkpoints of a training run, and which of them are whole."""

from pathlib import Path

import pytest

from launcher_scripts.trained_checkpoints import (
    TrainedCheckpoint,
    find_checkpoints,
    unknown_entries,
)


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def seen(run: Path) -> list[tuple[int, str, bool]]:
    return [(each.step, each.label, not each.missing) for each in find_checkpoints(run)]


def test_a_run_without_a_folder_has_no_checkpoints(tmp_path):
    assert find_checkpoints(tmp_path / "later") == []


@pytest.mark.parametrize(
    ("tracked", "whole"), [("200", [True, True]), ("100\n", [True, False]), ("x", [False, False])]
)
def test_megatron_names_the_last_finished_iteration(tmp_path, tracked, whole):
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000200").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracked)
    assert [each[2] for each in seen(tmp_path)] == whole


def test_megatron_without_its_tracker_is_waited_for(tmp_path):
    (tmp_path / "iter_0000100").mkdir()
    (found,) = find_checkpoints(tmp_path)
    assert found.missing == "its number in latest_checkpointed_iteration.txt"


def test_hugging_face_trainers_write_their_state_last(tmp_path):
    touch(tmp_path / "checkpoint-500" / "model.safetensors")
    touch(tmp_path / "checkpoint-1000" / "model.safetensors")
    touch(tmp_path / "checkpoint-500" / "trainer_state.json")
    (tmp_path / "checkpoint-best").mkdir()
    assert seen(tmp_path) == [(500, "checkpoint-500", True), (1000, "checkpoint-1000", False)]


def test_nemo_marks_what_it_is_writing(tmp_path):
    folder = tmp_path / "checkpoints"
    names = ["gpt--val_loss=2.1-step=10-consumed_samples=80.0", "gpt--step=20", "gpt--step=20-last"]
    for name in names:
        (folder / name / "weights").mkdir(parents=True)
    touch(folder / f"{names[1]}-unfinished")
    assert seen(tmp_path) == [(10, names[0], True), (20, names[2], True)]
    touch(folder / f"{names[2]}-unfinished")
    assert [each[2] for each in seen(tmp_path)] == [True, False]


def test_a_nemo_1_checkpoint_is_a_file_of_every_rank(tmp_path):
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


MEGATRON, TRACKER = "latest_checkpointed_iteration.txt", "3"
IN_STEP = "policy/weights/iter_0000000"


@pytest.mark.parametrize(
    ("name", "files", "last", "text", "model"),
    [
        ("global_step_3", ["actor/dist_ckpt/.metadata"], MEGATRON, TRACKER, "actor"),
        ("global_step_3", ["huggingface/config.json"], MEGATRON, TRACKER, ""),
        ("global_step3", ["layer_00-model_00-model_states.pt"], "latest", "global_step3", ""),
        ("checkpoint-3", ["optimizer_0/.metadata"], "checkpoint-3/trainer_state.json", "", ""),
        ("checkpoint_3", ["model.safetensors"], "checkpoint_3/random_states_0.pkl", "", ""),
        ("step-3", ["__0_0.distcp"], "step-3/.metadata", "", ""),
        ("step-3", ["model-00001.safetensors"], "step-3/model.safetensors.index.json", "", ""),
        ("epoch_7_step_3", ["model/.metadata"], "epoch_7_step_3/config.yaml", "", ""),
        ("step_3", [f"{IN_STEP}/.metadata"], "step_3/training_info.json", "", IN_STEP),
        ("step_3", ["model.safetensors"], "step_3/STABLE", "", ""),
    ],
)  # fmt: skip
def test_each_trainer_says_in_its_own_way_that_a_checkpoint_is_whole(
    tmp_path, name, files, last, text, model
):
    folder = tmp_path / "checkpoint"
    touch(*(folder / name / each for each in files))
    (found,) = find_checkpoints(tmp_path)
    assert (found.step, found.path) == (3, folder / name / model)
    assert Path(last).name in found.missing
    (folder / last).write_text(text)
    (found,) = find_checkpoints(tmp_path)
    assert found.missing == ""


def test_automodel_marks_what_it_is_writing(tmp_path):
    folder = tmp_path / "epoch_0_step_10"
    touch(folder / "config.yaml", folder / ".incomplete")
    assert find_checkpoints(tmp_path)[0].missing == "the removal of .incomplete"


def test_checkpoints_without_a_step_that_is_known_are_named(tmp_path):
    known = tmp_path / "checkpoints" / "iter_0000100"
    touch(known / ".metadata", tmp_path / "checkpoints" / "gpt.nemo")
    touch(tmp_path / "final" / "config.json", tmp_path / "hf_iter100" / "rank0.bin")
    touch(tmp_path / "tensorboard" / "events.1", tmp_path / "tmp_step_9" / "training_info.json")
    (tmp_path / "latest_1").symlink_to(known)
    found = [path.name for path in unknown_entries(tmp_path)]
    assert found == ["final", "hf_iter100", "gpt.nemo"]
