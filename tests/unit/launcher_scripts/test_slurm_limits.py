"""Slurm's word on jobs beforehand, with small scripts in place of its commands."""

# ruff: noqa: F811 - fixtures come by import

from pathlib import Path

import pytest

from launcher_scripts.launchers.base import QueueSlots
from stages.base import Resources
from tests.unit.launcher_scripts.test_slurm_checks import (
    launcher,
    programs,
    slurm,  # noqa: F401
    stage,
)

SINFO = "\n".join(
    (
        "short*|4:00:00",
        "long|7-00:00:00",
        "open|infinite",
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
    ("asked", "words", "key"),
    [
        (Resources(time_limit_min=DAY), (), "ranks.time_limit=1-00:00:00: short allows"),
        (Resources(time_limit_min=8 * DAY), ("cluster.partition=long",), "ranks.time_limit="),
        (Resources(time_limit_min=DAY), ("cluster.partition='short,long'",), ""),  # one is enough
        (Resources(time_limit_min=30 * DAY), ("cluster.partition=open",), ""),
    ],
)
def test_job_that_its_partition_would_never_start_is_refused(tmp_path, asked, words, key):
    found = problems(tmp_path, asked, *words)
    assert len(found) == bool(key)
    assert all(problem.startswith(key) for problem in found)


@pytest.mark.parametrize(
    ("error", "away", "is_refused"),
    [
        ("Invalid --mem specification", "", True),
        ("Requested node configuration is not available", "", True),
        ("Requested node configuration is not available", "1", False),  # that node may come back
        ("Job violates accounting/QOS policy (job submit limit)", "", False),  # it is waited for
        ("Unable to contact slurm controller (connect failure)", "", False),
    ],
)
def test_what_sbatch_refuses_is_refused_beforehand_in_its_words(
    tmp_path, cluster, error, away, is_refused
):
    programs(
        cluster, sbatch=f"echo 'allocation failure: {error}' >&2; exit 1",
        sinfo=f'case "$*" in *-t*) echo {away};; *) echo "short*|4:00:00";; esac',
    )  # fmt: skip
    found = problems(tmp_path, Resources(nodes=2, gpus_per_node=3))
    assert len(found) == is_refused
    assert all(error in each and "--gpus-per-node=3 " in each for each in found)


def test_the_option_that_sbatch_refuses_is_named_once(tmp_path, cluster):
    programs(cluster, sbatch='case "$*" in *--mem=9G*) echo "too much" >&2; exit 1;; esac')
    stages = [stage(tmp_path, asked) for asked in (Resources(), Resources(nodes=2))]
    (problem,) = launcher("cluster.mpi=null", "cluster.mem=9G").check(stages)
    assert problem.startswith("ranks, ranks: sbatch refuses --mem=9G: too much; correct the keys")


def test_a_machine_without_slurm_is_named_once(tmp_path, cluster):
    said = "sbatch: fatal: Could not establish a configuration source"
    programs(cluster, sbatch=f"echo x >> {cluster}/calls; echo '{said}' >&2; exit 1")
    (problem,) = launcher("cluster.mpi=null").check([stage(tmp_path), stage(tmp_path)])
    assert problem.startswith(f"Slurm cannot be used from this machine: {said}; run where sinfo ")
    assert (cluster / "calls").read_text() == "x\n"


def test_partition_of_a_profile_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    assert problems(tmp_path, Resources(time_limit_min=DAY)) == []


def test_qos_may_lift_the_limit_of_a_partition(tmp_path, cluster):
    answer = 'case "$*" in *flags*) echo "long|DenyOnLimit,PartitionTimeLimit";; esac'
    programs(cluster, sacctmgr=answer)
    assert problems(tmp_path, Resources(time_limit_min=DAY), "cluster.qos=long") == []


def test_limits_of_an_account_are_those_of_one_that_is_used(tmp_path, cluster):
    programs(cluster, sacctmgr="echo 'small|1:00:00|4'; echo 'large||'", squeue="echo 1; echo 2")
    asked, small = Resources(time_limit_min=120), "cluster.account=small"
    assert problems(tmp_path, asked) == []
    (problem,) = problems(tmp_path, asked, small)
    assert problem.startswith("ranks.time_limit=02:00:00: account small allows at most")
    assert launcher(small).queue_slots() == QueueSlots(free=2, limit=4, owner="account small")
    assert launcher().queue_slots() is None
