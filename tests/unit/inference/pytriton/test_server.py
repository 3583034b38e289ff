"""PyTriton's server before it loads anything: how many processes it needs."""

from __future__ import annotations

import os

import pytest

from inference.launch_environment import LAUNCHER_VARIABLE
from inference.pytriton.server import main


@pytest.fixture
def started_by_mpirun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Three processes; the test says which of them this is."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMIX_", "SLURM_")) or name == LAUNCHER_VARIABLE:
            monkeypatch.delenv(name)
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.setenv(name, "3")
    return monkeypatch


@pytest.mark.parametrize(("rank", "status"), [(0, 2), (1, 0), (2, 0)])
def test_wrong_number_of_processes_is_reported_once(
    started_by_mpirun: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    status: int,
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        started_by_mpirun.setenv(name, str(rank))
    assert main(["--tp", "2", "--pp", "2"]) == status
    said = capsys.readouterr().err
    if rank:
        assert said == ""
        return
    problem = "--tp=2 x --pp=2 = 4 ranks need as many processes, 3 were started by mpirun"
    assert said.startswith(f"error: {problem}; start them with `mpirun -n 4`")
    assert len(said.splitlines()) == 1


def test_sizes_below_one_are_refused(
    started_by_mpirun: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started_by_mpirun.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["--tp", "0"]) == 2
    assert "--tp=0 and --pp=1 must be at least 1" in capsys.readouterr().err
