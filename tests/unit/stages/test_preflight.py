"""The ping of several ranks before a stage, with processes that a launcher could have started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.waiting import until


def rank(folder: Path, number: int, *, ranks: int = 2, mpi: str = "none") -> subprocess.Popen[str]:
    """Start one of two processes, which expects so many ranks."""
    place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": str(number), "MASTER_ADDR": "x"}
    program = (
        "import os, sys; from pathlib import Path\n"
        "from inference.launch_environment import read_launch_environment\n"
        "from stages.preflight import meet\n"
        "place = read_launch_environment(os.environ)\n"
        "meet(place, Path(sys.argv[1]), ranks=int(sys.argv[2]), mpi=sys.argv[3])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder), str(ranks), mpi],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_every_rank_reaches_the_first(tmp_path: Path) -> None:
    # Files of an earlier start are not believed for long.
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


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1", b"ping of rank 0", b"ping of rank 2"])
def test_stranger_does_not_count_as_a_rank(tmp_path: Path, said: bytes) -> None:
    first = rank(tmp_path, 0)
    until((tmp_path / "ping.json").exists)
    port = json.loads((tmp_path / "ping.json").read_text())["port"]
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(4) == b""
    second = rank(tmp_path, 1)
    for process in (second, first):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
