"""Two nodes whose link is cut without a word from either: both ends notice and end."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.waiting import until

TIMEOUT_S = 3.0  # of the ranks; the default is 7
NOTICE_S = 60.0  # of a slow machine; promised is an overdue answer, and a heartbeat
HEAD = "10.97.13.1"
PORT = 29577
RANK_0 = """
import sys, time
from pathlib import Path
from inference.system.launch_environment import LaunchEnvironment
from inference.ranks.rendezvous import Rendezvous
host, port, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
key_file = Path(sys.argv[4])
place = LaunchEnvironment(0, 2, 0, 1, "test", "a")
rendezvous = Rendezvous(place, host, port, key_file=key_file, timeout_s=timeout_s)
print("open", flush=True)
while not rendezvous.store.check(["who/1"]):
    time.sleep(0.05)
print("joined", flush=True)
while not (problems := rendezvous.problems()):
    time.sleep(0.05)
print(problems[1], flush=True)
"""
RANK_1 = """
import logging, sys
from pathlib import Path
from inference.system.launch_environment import LaunchEnvironment
from inference.ranks.worker import serve_launched_rank
host, port, timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
key_file = Path(sys.argv[4])
logging.basicConfig(level=logging.INFO)
place = LaunchEnvironment(1, 2, 0, 1, "test", "a")
sys.exit(serve_launched_rank(place, host, port, key_file=key_file, timeout_s=timeout_s))
"""


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Yields two network namespaces that reach each other over one link, `wire` in each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    names = (f"slipway-a-{os.getpid()}", f"slipway-b-{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            made.append(name)
            for words in (("netns", "add", name), ("-n", name, "link")):
                done = subprocess.run(["ip", *words], capture_output=True, text=True)
                if done.returncode:
                    pytest.skip(f"network namespaces are not allowed here: {done.stderr.strip()}")
        first, second = names
        ip("link", "add", "wire", "netns", first, "type", "veth", "peer", "wire", "netns", second)
        for name, address in zip(names, (HEAD, "10.97.13.2"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
        yield first, second
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def run(node: str, program: str, key_file: Path, *, stderr: int) -> subprocess.Popen[str]:
    words = [HEAD, str(PORT), str(TIMEOUT_S), str(key_file)]
    return subprocess.Popen(
        ["ip", "netns", "exec", node, sys.executable, "-c", program, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def test_cut_link_ends_both_sides_with_the_reason(nodes, tmp_path):
    head, other = nodes
    rank_0 = run(head, RANK_0, tmp_path / "key", stderr=subprocess.DEVNULL)
    rank_1 = None
    try:
        assert rank_0.stdout is not None
        assert rank_0.stdout.readline() == "open\n"
        rank_1 = run(other, RANK_1, tmp_path / "key", stderr=subprocess.STDOUT)
        assert rank_0.stdout.readline() == "joined\n"
        ip("-n", head, "link", "set", "wire", "down")
        until(lambda: rank_0.poll() is not None, "rank 0's notice", limit_s=NOTICE_S)
        assert rank_0.stdout.read().startswith("has sent no heartbeat for ")
        until(lambda: rank_1.poll() is not None, "the end of rank 1", limit_s=NOTICE_S)
        assert rank_1.stdout is not None
        assert "rank 0 is gone" in rank_1.stdout.read()
        assert rank_1.returncode == 1
    finally:
        for process in (rank_0, rank_1):
            if process is not None:
                process.kill()
                process.communicate()
