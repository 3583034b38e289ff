"""A plan on a machine that does not have the checkpoint: sizes stand for it in a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.main import main

# 43B over 32 GPUs, of NVIDIA's guide.
SIZES = (
    "export.model.sizes.family=gpt", "export.model.sizes.hidden=8192",
    "export.model.sizes.layers=48", "export.model.sizes.heads=64",
    "export.model.sizes.vocab=256000",
)  # fmt: skip
PIPELINE = "export.triton_deployment.pipeline_model_parallel_size"


def plan(tmp_path: Path, *words: str) -> int:
    where = (f"base_results_dir={tmp_path}", "export.run.model_train_name=gpt3_43b")
    return main([*where, "export.model.checkpoint_path=/elsewhere/gpt3_43b.nemo", *words])


def test_sizes_stand_for_a_checkpoint_that_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "cluster=bcm", "dry_run=true", f"{PIPELINE}=4", *SIZES) == 0
    text = capsys.readouterr().out
    assert "planned without the checkpoint: gpt, 40.8 G parameters, 3.47 GB of fp16" in text
    assert "on each of 32 ranks" in text
    assert "#SBATCH --nodes=4" in text
    table = [line.split() for line in text.splitlines()[-8:]]
    assert table[0] == ["job", "nodes", "GPUs", "time", "depends", "on"]
    assert table[4] == ["deploy", "(10003)", "4", "32", "1-00:00:00", "afterok:10002"]


def test_sizes_stand_for_a_folder_of_vllm_that_is_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cluster=bcm", "stages=[deploy]", "deploy.engine=vllm", f"{PIPELINE}=2",
             "deploy.repository=/elsewhere/gpt3_43b")  # fmt: skip
    assert plan(tmp_path, *words, *SIZES, "dry_run=true") == 0
    text = capsys.readouterr().out
    assert "planned without the checkpoint: gpt, 40.8 G parameters" in text
    assert "--nnodes 2 --node-rank 0" in text
    assert plan(tmp_path, *words, "dry_run=true") == 2
    assert "/elsewhere/gpt3_43b has no config.json" in capsys.readouterr().err
    assert plan(tmp_path, *words, *SIZES, "dry_run=true", f"{PIPELINE}=5") == 2
    assert f"{PIPELINE}=5 does not divide export" in capsys.readouterr().err


def test_an_image_that_only_the_cluster_has_is_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cluster=bcm", "container=/cluster/only.sqsh", f"{PIPELINE}=4", *SIZES)
    assert plan(tmp_path, *words, "dry_run=true") == 0
    assert "--container-image=/cluster/only.sqsh" in capsys.readouterr().out
    assert plan(tmp_path, *words) == 2
    assert "container=/cluster/only.sqsh is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dry_run=true",), "does not exist; check the spelling"),
        (
            ("dry_run=true", *SIZES[:2]),
            "sizes.layers, export.model.sizes.heads are not set",
        ),
        (
            ("dry_run=true", *SIZES, f"{PIPELINE}=5"),
            f"{PIPELINE}=5 does not divide export",
        ),
        (
            ("dry_run=true", *SIZES, "export.model.tensor_model_parallel_size=7"),
            "export.model.tensor_model_parallel_size=7 does not divide the heads",
        ),
        (
            ("dry_run=true", *SIZES, "export.model.sizes.heads=63"),
            "model.sizes: hidden=8192",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert plan(tmp_path, "cluster=bcm", *words) == 2
    assert message in capsys.readouterr().err


def test_jobs_are_never_made_of_sizes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, *SIZES) == 2
    assert "gpt3_43b.nemo does not exist" in capsys.readouterr().err
