"""Folders that outlive their process, and those that must not be touched."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from inference.system.private_folder import PrivateFolder
from tests.conftest import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from inference.system.private_folder import PrivateFolder
print(PrivateFolder("test", place=Path(sys.argv[1])).path, flush=True)
time.sleep(600)
"""


def test_next_process_removes_the_folder_of_a_killed_one_alone(tmp_path):
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with started:
        assert started.stdout is not None
        other = Path(started.stdout.readline().strip())
        (other / "file").touch()
        mine = PrivateFolder("test", place=tmp_path)
        assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
        assert (other / "file").exists()
        os.kill(started.pid, signal.SIGKILL)
    of_another_kind = tmp_path / "slipway-other-1"
    of_another_kind.mkdir()
    link = tmp_path / "slipway-test-link"
    link.symlink_to(of_another_kind)
    another = PrivateFolder("test", place=tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([of_another_kind, link, mine.path, another.path])
    another.remove()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
