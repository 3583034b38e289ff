"""Limits of partitions and associations, with small scripts in place of Slurm's commands."""

# ruff: noqa: F811 - fixtures come by import

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.launchers.base import Room
from launcher_scripts.launchers.slurm_limits import generic_resources, largest_array
from stages.base import Resources
from tests.unit.launcher_scripts.test_slurm_checks import (
    launcher,
    programs,
    slurm,  # noqa: F401
    stage,
)

SINFO = "\n".join(
    (
        "short*|4:00:00|1-2|8|gpu:a100:8(S:0-1)|64000+",
        "long|7-00:00:00|1-infinite|2|gpu:v100:4|16000",
        "long|7-00:00:00|1-infinite|6|(null)|16000",
        "open|infinite|1-infinite|4|(null)|16000",
    )
)
DAY = 24 * 60


def problems(tmp_path: Path, asked: Resources, *words: str) -> list[str]:
    return launcher("cluster.mpi=null", *words).check([stage(tmp_path, asked)])


@pytest.fixture(autouse=True)
def cluster(slurm: Path) -> Path:
    programs(slurm, sinfo=f"cat <<'EOF'\n{SINFO}\nEOF", sacctmgr="exit 1", squeue="exit 1")
    return slurm


@pytest.mark.parametrize(
    ("text", "gpus", "typed"),
    [
        ("gpu:8", 8, 0), ("gpu:a100:8(S:0-3)", 8, 8), ("gpu", 1, 0), ("(null)", 0, 0), ("", 0, 0),
        ("gpu:a100:2(S:0),gpu:v100:3(S:1),mps:400", 5, 2), ("gres/gpu:a100:1", 1, 1),
        ("lustre:no_consume:4G,gpu:a100:no_consume:2", 2, 2),
    ],
)  # fmt: skip
def test_generic_resources_are_read_in_every_form(text: str, gpus: int, typed: int) -> None:
    found = generic_resources(text)
    assert (found["gpu"], found["gpu:a100"]) == (gpus, typed)


@pytest.mark.parametrize(
    ("asked", "words", "key"),
    [
        (Resources(time_limit_min=DAY), (), "ranks.time_limit=1-00:00:00: short takes"),
        (Resources(time_limit_min=8 * DAY), ("cluster.partition=long",), "ranks.time_limit="),
        (Resources(nodes=3), (), "ranks needs 3 nodes"),
        (Resources(nodes=9), ("cluster.partition=open",), "ranks needs 9 nodes"),
        (Resources(gpus_per_node=8), ("cluster.partition=long",), "ranks needs 1 nodes of 8 gpu,"),
        (Resources(nodes=3, gpus_per_node=4), ("cluster.partition=long",), "ranks needs 3 nodes"),
        (Resources(), ("cluster.gres='gpu:h100:1'",), "ranks needs 1 nodes of 1 gpu, 1 gpu:h100"),
        (Resources(mem_gb=100), (), "ranks needs 1 nodes of 102400 MB"),
    ],
)
def test_job_that_its_partition_would_never_start_is_refused(
    tmp_path: Path, asked: Resources, words: tuple[str, ...], key: str
) -> None:
    (problem,) = problems(tmp_path, asked, *words)
    assert problem.startswith(key)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Resources(nodes=2, gpus_per_node=4), ("cluster.partition=long",)),
        (Resources(time_limit_min=DAY), ("cluster.partition='short,long'",)),  # one is enough
        (Resources(time_limit_min=30 * DAY), ("cluster.partition=open",)),
        (Resources(gpus_per_node=8), ("cluster.gres='gpu:a100:2'",)),
    ],
)
def test_job_that_fits_a_partition_is_taken(
    tmp_path: Path, asked: Resources, words: tuple[str, ...]
) -> None:
    assert problems(tmp_path, asked, *words) == []


def test_partition_of_a_profile_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    assert problems(tmp_path, Resources(time_limit_min=DAY)) == []


def test_qos_may_lift_the_limit_of_a_partition(tmp_path: Path, cluster: Path) -> None:
    answer = 'case "$*" in *flags*) echo "long|DenyOnLimit,PartitionTimeLimit";; esac'
    programs(cluster, sacctmgr=answer)
    assert problems(tmp_path, Resources(time_limit_min=DAY), "cluster.qos=long") == []


def test_limits_of_an_account_are_those_of_one_that_is_used(tmp_path: Path, cluster: Path) -> None:
    programs(cluster, sacctmgr="echo 'small|1:00:00|4'; echo 'large||'", squeue="echo 1; echo 2")
    asked, small = Resources(time_limit_min=120), "cluster.account=small"
    assert problems(tmp_path, asked) == []
    (problem,) = problems(tmp_path, asked, small)
    assert problem.startswith("ranks.time_limit=02:00:00: account small takes jobs of at most")
    assert launcher(small).room() == Room(free=2, most=4, owner="account small")
    assert launcher().room() is None


def test_size_of_an_array_is_that_of_the_cluster(cluster: Path) -> None:
    programs(cluster, scontrol="echo 'MaxArraySize            = 17'")
    assert largest_array() == 17
    programs(cluster, scontrol="exit 1")
    assert largest_array() == 1001
