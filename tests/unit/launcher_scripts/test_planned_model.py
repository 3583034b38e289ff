"""A plan without the checkpoint: a dry run for a cluster does without it."""

from pathlib import Path

from launcher_scripts.main import main

# 43B over 32 GPUs, of NVIDIA's guide.
PIPELINE = "export.triton_deployment.pipeline_model_parallel_size"


def plan(tmp_path: Path, *words: str) -> int:
    where = (f"base_results_dir={tmp_path}", "export.run.model_train_name=gpt3_43b")
    return main([*where, "export.model.checkpoint_path=/elsewhere/gpt3_43b.nemo", *words])


def test_scripts_are_written_for_a_checkpoint_that_is_elsewhere(tmp_path, capsys):
    assert plan(tmp_path, "cluster=bcm", "dry_run=true", f"{PIPELINE}=4") == 0
    text = capsys.readouterr().out
    assert "checkpoint_path=/elsewhere/gpt3_43b.nemo is not on this machine" in text
    assert "#SBATCH --nodes=4" in text
    table = [line.split() for line in text.splitlines()[-8:]]
    assert table[0] == ["job", "nodes", "GPUs", "time", "depends", "on"]
    assert table[4] == ["deploy", "(10003)", "4", "32", "1-00:00:00", "afterok:10002"]


def test_a_folder_of_vllm_may_be_elsewhere(tmp_path, capsys):
    words = ("cluster=bcm", "stages=[deploy]", "deploy.engine=vllm", f"{PIPELINE}=2",
             "deploy.repository=/elsewhere/gpt3_43b")  # fmt: skip
    assert plan(tmp_path, *words, "dry_run=true") == 0
    assert "--nnodes 2 --node-rank 0" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    here = f"deploy.repository={tmp_path}/empty"
    assert plan(tmp_path, *words[:-1], here, "dry_run=true") == 2
    assert "empty has no config.json" in capsys.readouterr().err


def test_an_image_that_only_the_cluster_has_is_planned_with(tmp_path, capsys):
    words = ("cluster=bcm", "container=/cluster/only.sqsh", f"{PIPELINE}=4")
    assert plan(tmp_path, *words, "dry_run=true") == 0
    assert "--container-image=/cluster/only.sqsh" in capsys.readouterr().out
    assert plan(tmp_path, *words) == 2
    assert "container=/cluster/only.sqsh is not a file" in capsys.readouterr().err


def test_jobs_are_never_made_without_the_checkpoint(tmp_path, capsys):
    for words in (["cluster=bcm"], ["dry_run=true"]):
        assert plan(tmp_path, *words) == 2
        assert "gpt3_43b.nemo does not exist" in capsys.readouterr().err


def test_stated_sizes_are_refused_with_what_does_without_them(tmp_path, capsys):
    assert plan(tmp_path, "cluster=bcm", "dry_run=true", "export.model.sizes.family=gpt") == 2
    assert "export.model.sizes.family was removed; a dry run" in capsys.readouterr().err
