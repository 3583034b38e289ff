"""Batch scripts: each rule of rendering separately; whole scripts are in tests/golden/scripts."""

import subprocess

import pytest

from launcher_scripts.configuration.arguments import read_arguments
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.evaluation_config import Context
from launcher_scripts.configuration.schema import Config
from launcher_scripts.launchers.base import Job, as_options
from launcher_scripts.launchers.slurm_script import (
    batch_script,
    environment_of_sbatch,
    memory,
    mounts,
    sbatch_options,
    step_of,
)
from launcher_scripts.stage_table import build_stage


def configure(*words: str) -> Config:
    composition = compose_config(
        read_arguments(["export=gpt3/sample", "base_results_dir=/r", *words]).overrides
    )
    assert not composition.problems
    assert composition.config is not None
    return composition.config


def job(config: Config, name: str) -> Job:
    return Job(build_stage(name, config, Context(frozenset({"deploy"}))), config)


def options(name: str, *words: str, after: str = "") -> dict[str, object]:
    config = configure("cluster=bcm", *words)
    found = sbatch_options(job(config, name), after)
    return {key: value for key, value in found.items() if value is not None and value is not False}


def test_null_and_false_leave_an_option_out_and_values_are_quoted_in_a_script():
    given = {"a": None, "b": False, "c": True, "d": 0, "e": "a b", "f": "D\\user"}
    assert as_options(given) == ["--c", "--d=0", "--e=a b", "--f=D\\user"]
    words = ["cluster=bcm", "+cluster.comment='D\\user s'"]
    script = batch_script(job(configure(*words), "convert"), "")
    # sbatch takes a backslash for an escape.
    assert "#SBATCH --comment='D\\\\user s'\n" in script


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (4, "4GB"),
        (1.5, "1536MB"),
        (1e-4, "1MB"),
        ("12G", "12G"),
        ("12", "12GB"),
        (None, None),
    ],
)
def test_memory_is_in_gigabytes_and_zero_is_all(value, expected):
    assert memory(value) == expected


def test_job_of_a_chain_is_not_requeued_but_followed():
    assert "no-requeue" not in options("deploy", "deploy.uptime=1:00:00")  # one job is enough
    found = options("deploy", "deploy.uptime=7-00:00:00")
    assert found["no-requeue"] is True
    assert "requeue" not in found
    assert found["time"] == "1-00:00:00"


def test_the_end_of_a_job_ends_none_of_another_cluster_with_the_same_id():
    """A job kills at its end what has its mark; clusters that share a node count alike."""
    marks = set()
    for results in ("/r", "/another place"):
        config = configure("cluster=bcm", f"base_results_dir={results}")
        (mark,) = (
            line
            for line in batch_script(job(config, "deploy"), "").splitlines()
            if line.startswith("export SLIPWAY_JOB_MARK=")
        )
        script = f"SLURM_JOB_ID=3\n{mark}\nprintenv SLIPWAY_JOB_MARK"
        marks.add(subprocess.run(["bash", "-euc", script], capture_output=True, check=True).stdout)
    assert len(marks) == 2


def test_gpus_per_task_come_with_a_number_of_tasks():
    found = options("deploy", "cluster.gpus_per_task=2", "cluster.gpus_per_node=null")
    assert (found["gpus-per-task"], found["ntasks"]) == (2, 1)


@pytest.mark.parametrize(("text", "expected"), [("2:00:00", "02:00:00"), ("90", "01:30:00")])
def test_time_limits_keep_their_meaning(text, expected):
    assert options("convert", f"export.run.time_limit={text}")["time"] == expected


def test_only_the_id_in_the_path_of_a_log_stands_for_something():
    found = options("convert", "base_results_dir=/r/50%j")
    folder = "/r/50%%j/gpt_books_5m/export_tp2_pp1_fp16_fp32/convert"
    assert found["output"] == f"{folder}/log-nemo-megatron-export_gpt_books_5m_%j.out"
    assert found["error"] == f"{folder}/log-nemo-megatron-export_gpt_books_5m_%j.err"


def test_dependencies_are_combined():
    found = options("export", "cluster.dependency=after:9", after="afterok:12")["dependency"]
    assert found == "afterok:12,singleton,after:9"
    either = "afterany:12?after:12+5"  # Slurm refuses a comma next to it
    assert options("deploy", "cluster.dependency=after:9", after=either)["dependency"] == either


def test_a_folder_below_a_mounted_one_is_not_mounted_again():
    found = mounts(configure("cluster=bcm"))
    assert "/r:/r" in found
    assert not any(each.startswith("/r/") for each in found)


def test_ci_switch_of_the_launcher_merges_output_and_errors(
    monkeypatch,
):
    assert str(options("convert")["error"]).endswith("_%j.err")
    monkeypatch.setenv("NEMO_LAUNCHER_CI", "1")
    found = options("convert")
    assert str(found["output"]).endswith("/convert/slurm_%j.out")
    assert "error" not in found


def test_options_of_a_profile_are_used_where_the_configuration_leaves_them_open(
    monkeypatch,
):
    values = {"ACCOUNT": "llm", "PARTITION": "a", "OUTPUT": "/x", "QOS": ""}
    for name, value in values.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("SLIPWAY_OWNER", "1")  # with it, a queued job would end with that process
    found = environment_of_sbatch(job(configure("cluster=bcm", "cluster.partition=b"), "convert"))
    assert {name: found[name] for name in found if name.startswith(("SBATCH_", "SLIPWAY_"))} == {
        "SBATCH_ACCOUNT": "llm", "SBATCH_QOS": "",
    }  # fmt: skip


def test_container_that_is_on_the_nodes_is_started_by_its_name():
    words = ("--container-name=nemo", "--no-container-mount-home", "--label")
    quoted = ",".join(f"'{each}'" for each in words)
    config = configure("cluster=bcm", f"cluster.srun_args=[{quoted}]")
    step = step_of(job(config, "convert"))
    assert step is not None
    assert step.prefix[-3:] == words
    assert any(each.startswith("--container-mounts=") for each in step.prefix)
    assert step.python == config.cluster.container_python
