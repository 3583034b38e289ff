"""PyTriton's server before it loads anything: how many processes it needs."""

import os
import re
import shlex
import subprocess

import pytest

from inference.pytriton.server import main
from inference.system.launch_environment import LAUNCHER_VARIABLE
from tests.conftest import ROOT


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
    started_by_mpirun,
    capsys,
    rank,
    status,
):
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


def test_sizes_below_one_are_refused(started_by_mpirun, capsys):
    started_by_mpirun.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["--tp", "0"]) == 2
    assert "--tp=0 and --pp=1 must be at least 1" in capsys.readouterr().err


def test_wrong_rendezvous_is_reported(started_by_mpirun, capsys):
    started_by_mpirun.setenv("OMPI_COMM_WORLD_RANK", "0")
    started_by_mpirun.setenv("MASTER_PORT", "99999")
    assert main(["--tp", "3"]) == 2
    assert capsys.readouterr().err.startswith("error: the rendezvous port is 99999; it must be")


def test_batch_script_of_the_document_starts_the_server_with_options_it_has(
    capsys,
):
    text = (ROOT / "docs" / "pytriton.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/usr/bin/env bash\n.*?)```", text, re.DOTALL)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    command = words[words.index("inference.pytriton.server") + 1 :]
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert [word for word in command if word.startswith("--") and word not in shown] == []
    nodes, tasks = (
        int(re.search(rf"#SBATCH --{name}=(\d+)", script)[1])  # type: ignore[index]
        for name in ("nodes", "ntasks-per-node")
    )
    sizes = [int(command[command.index(name) + 1]) for name in ("--tp", "--pp")]
    assert sizes[0] * sizes[1] == nodes * tasks
