"""The ping of several ranks before a step, with processes that a launcher could have started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def rank(folder: Path, number: int, *, ranks: int = 2, mpi: str = "none") -> subprocess.Popen[str]:
    """Start one of two processes, which expects so many ranks."""
    place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "MASTER_ADDR": "x"}
    return subprocess.Popen(
        [sys.executable, "-m", "stages.preflight", str(folder), str(ranks), mpi],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_every_rank_reaches_the_first(tmp_path: Path) -> None:
    # What an earlier start has left is not believed for long.
    (tmp_path / "ping.json").write_text('{"hosts": ["localhost"], "port": 9}')
    ranks = [rank(tmp_path, 1), rank(tmp_path, 0)]
    for number, process in zip((1, 0), ranks, strict=True):
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert said.startswith(f"rank {number} on ")
        assert said.endswith(" reaches the first\n")


@pytest.mark.parametrize(
    ("ranks", "mpi", "reported"),
    [
        (4, "none", "sees 2 ranks instead of 4"),
        (2, "pmix", "got no PMIX_RANK: cluster.mpi=pmix does not reach it"),
    ],
)
def test_rank_that_is_alone_or_without_its_mpi_says_so(
    tmp_path: Path, ranks: int, mpi: str, reported: str
) -> None:
    process = rank(tmp_path, 0, ranks=ranks, mpi=mpi)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert reported in said
