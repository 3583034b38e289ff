"""Checks before a job is submitted, with small scripts in place of Slurm's commands."""

from pathlib import Path

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.launchers.slurm import SlurmLauncher
from launcher_scripts.launchers.slurm_checks import local_file_system
from launcher_scripts.launchers.slurm_limits import _test_only
from launcher_scripts.main import main
from stages.base import Resources, Stage
from tests.unit.launcher_scripts.toy_stages import RanksStage, settings

SINFO = "echo 'batch*|infinite'"
REFUSED = "echo 'sbatch: error: no such account' >&2; exit 1"
UNKNOWN = "echo \"srun: unrecognized option '$each'\" >&2; exit 255"
SRUN = f"""for each; do case $each in
  --container-image=*|--nope) {UNKNOWN};; --mpi=list) echo "MPI: none pmi2" >&2;;
esac; done"""
TWO_NODES = Resources(nodes=2)


def programs(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch) -> Path:
    """Commands of a Slurm without pyxis and without PMIx; return their folder."""
    folder = tmp_path / "bin"
    programs(folder, sbatch="", sinfo=SINFO, srun=SRUN)
    _test_only.cache_clear()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def launcher(*words: str) -> SlurmLauncher:
    config = compose_config(
        read_arguments(["export=gpt3/sample", "cluster=bcm", *words]).overrides
    ).config
    assert config is not None
    return SlurmLauncher(config)


def stage(tmp_path: Path, resources: Resources | None = None) -> Stage:
    return RanksStage(settings(tmp_path, "ranks", resources=resources or Resources()))


def test_a_job_that_fits_has_no_problems(tmp_path):
    assert launcher("cluster.partition=batch").check([stage(tmp_path)]) == []


def test_every_problem_of_the_cluster_is_reported_at_once(tmp_path, slurm, capsys):
    programs(slurm, sbatch="echo 'invalid partition specified: bach' >&2; exit 1")
    words = [
        "export=gpt3/sample", "cluster=bcm", f"base_results_dir={tmp_path}/r",
        "cluster.partition=bach", "container=/nowhere.sqsh", "stages=[deploy]",
        "cluster.gpus_per_node=1", "export.triton_deployment.pipeline_model_parallel_size=3",
    ]  # fmt: skip
    assert main(words) == 2
    reported = capsys.readouterr().err
    assert "deploy: sbatch refuses " in reported
    assert "--partition=bach" in reported
    assert "container=/nowhere.sqsh is not a file" in reported
    assert "unrecognized option '--container-image=/nowhere.sqsh', says srun" in reported
    assert "containers need pyxis" in reported
    assert "pipeline_model_parallel_size=3 does not divide num_layer=4" in reported
    assert "does not have it, and without it every rank would believe" in reported
    assert not (tmp_path / "r").exists()


def test_ranks_that_no_number_of_nodes_holds_evenly_are_refused(tmp_path, capsys):
    words = [
        "export=gpt3/sample", "cluster=bcm", f"base_results_dir={tmp_path}/r", "stages=[deploy]",
        "export.model.tensor_model_parallel_size=11",
    ]  # fmt: skip
    assert main(words) == 2
    assert "asks for 11 GPUs, which cannot be divided evenly" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_not_held_against_the_job(tmp_path, slurm):
    away = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    programs(slurm, sbatch=away, sinfo="exit 1", srun="exit 1")
    found = launcher("cluster.partition=batch", "container=a#b").check([stage(tmp_path, TWO_NODES)])
    assert found == []


@pytest.mark.parametrize("sign", [":", ","])
def test_a_folder_that_no_container_can_see_is_refused(tmp_path, sign):
    words = ("dry_run=true", f"base_results_dir='{tmp_path}/a{sign}b'")
    assert launcher(*words).check([stage(tmp_path)]) == []
    problems = launcher(*words, "container=a#b").check([stage(tmp_path)])
    assert f"base_results_dir={tmp_path}/a{sign}b: pyxis mounts no folder with" in problems[0]


def test_mpi_matters_only_to_jobs_of_several_ranks(tmp_path):
    assert launcher("cluster.mpi=pmix").check([stage(tmp_path)]) == []
    (problem,) = launcher("cluster.mpi=pmix").check([stage(tmp_path, TWO_NODES)])
    assert problem.endswith("it has: none, pmi2.")


@pytest.mark.parametrize(
    ("word", "reported"),
    [
        ("+cluster.admin-comment=a\nb", "cluster.admin-comment='a\\nb': an option of sbatch is"),
        ("+cluster.mail_type=[END]", "cluster.mail_type=['END']: expected a single value"),
        ("+cluster.array=0-3", "cluster.array=0-3: the launcher sets this option itself"),
        ("+cluster.job_name=x", "cluster.job_name=x: the launcher sets this option itself"),
        (
            "+cluster.additional_parameters.gpus-per-node=4",
            "cluster.gpus-per-node=4: the launcher sets this option itself",
        ),
        ("base_results_dir='/r/a\\b'", "base_results_dir=/r/a\\b: Slurm writes no log"),
        ("container=image.sqsh", "container=image.sqsh would be searched in a registry"),
    ],
)
def test_values_that_no_slurm_takes_are_refused(tmp_path, word, reported):
    problems = launcher(word, "dry_run=true").check([stage(tmp_path)])
    assert [problem for problem in problems if problem.startswith(reported)], problems


def test_what_only_a_container_uses_is_taken_with_one(tmp_path):
    words = ("container_mounts=[/a]", "dry_run=true")
    assert launcher(*words, "container=a#b").check([stage(tmp_path)]) == []
    named = "cluster.srun_args=['--container-name=nemo','--container-env=A']"
    assert launcher(*words, named).check([stage(tmp_path)]) == []
    assert launcher(*words).check([]) == []  # nothing runs


def test_image_of_the_server_is_looked_at_like_that_of_the_other_jobs(tmp_path):
    serving = stage(tmp_path)
    serving.name = "deploy"  # type: ignore[misc]
    words = ("deploy.container=/nowhere.sqsh", "deploy.name=d")
    reported = launcher(*words).check([serving])
    assert any(each.startswith("deploy.container=/nowhere.sqsh is not a file") for each in reported)
    assert any("containers need pyxis" in each for each in reported)
    assert launcher(*words).check([stage(tmp_path)]) == []  # no server among the jobs


def test_a_job_that_slurm_has_forgotten_is_remarked_upon(slurm):
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    known = f'case "$*" in *12*) echo "12|PENDING|None|x";; *) {unknown};; esac'
    programs(slurm, squeue=known, scontrol=unknown, sacct="exit 1")
    words = ("export.run.dependency=afterok:12:9999", "cluster.dependency=singleton")
    (note,) = launcher(*words).notes([])
    assert "does not know job 9999" in note
    assert launcher(*words, "dry_run=true").notes([]) == []
    programs(slurm, squeue="echo 'Unable to contact slurm controller' >&2; exit 1")
    assert launcher(*words).notes([]) == []


def test_option_that_srun_does_not_know_is_refused(tmp_path):
    stages = [stage(tmp_path), stage(tmp_path)]
    (problem,) = launcher("cluster.srun_args=[--label,--nope]").check(stages)
    assert problem.startswith("srun: unrecognized option '--nope', says srun --nodes=1")
    assert problem.endswith("correct cluster.srun_args.")


def test_folders_in_memory_are_remarked_upon():
    assert local_file_system(Path("/dev/shm/results")) == "tmpfs"
    assert local_file_system(Path("/proc")) is None
    notes = launcher("base_results_dir=/dev/shm/results").notes([])
    assert any(
        "base_results_dir=/dev/shm/results is on a local file system of this" in n for n in notes
    )


def test_refusal_of_sbatch_is_reported_once(tmp_path, slurm, capfd):
    programs(slurm, sbatch=f'case "$1" in --test-only) ;; *) {REFUSED};; esac')
    words = ["export=gpt3/sample", "cluster=bcm", f"base_results_dir={tmp_path}/r"]
    assert main([*words, "stages=[convert]"]) == 1
    seen = capfd.readouterr()
    assert (seen.out + seen.err).count("no such account") == 1
