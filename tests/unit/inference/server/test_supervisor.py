"""The supervisor: nothing of its command outlives the owner, however the owner ends."""

import os
import resource
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from inference.server import supervisor
from inference.server.processes import descendants
from tests.waiting import LIMIT_S, lives, until

# A command that leaves a grandchild in a session of its own, out of reach of group signals.
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


def _run(
    command: list[str], *, number: int | None = None, grace_s: float = 60
) -> tuple[subprocess.Popen[bytes], Connection]:
    link, other = Pipe()
    number = os.dup(other.fileno()) if number is None else os.dup2(other.fileno(), number)
    other.close()
    process = subprocess.Popen(
        [*supervisor.PROGRAM, str(number), "", str(grace_s), *command],
        pass_fds=[number],
        start_new_session=True,
    )
    os.close(number)
    return process, link


def _family(tmp_path: Path, seconds: float) -> tuple[subprocess.Popen[bytes], Connection, int]:
    path = tmp_path / "pid"
    process, link = _run([sys.executable, "-c", FAMILY, str(path), str(seconds)])
    until(lambda: path.exists() and path.read_text() != "")
    return process, link, int(path.read_text())


def _sleeping(tmp_path: Path, first: str = "") -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a command and return once it has done what comes first, and sleeps."""
    path = tmp_path / "sleeps"
    script = f"import signal, sys, time\n{first}\nopen(sys.argv[1], 'w')\ntime.sleep(60)"
    process, link = _run([sys.executable, "-c", script, str(path)])
    until(path.exists)
    return process, link


def test_status_is_passed_on_and_grandchildren_end(tmp_path):
    process, link, grandchild = _family(tmp_path, 0.1)
    assert process.wait(LIMIT_S) == 7
    assert not lives(grandchild)
    link.close()


def test_closed_link_ends_command_and_grandchildren(tmp_path):
    process, link, grandchild = _family(tmp_path, 60)
    link.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not lives(grandchild)


def test_a_link_of_an_owner_with_many_files():
    """select() refuses descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        process, link = _run([sys.executable, "-c", "import time; time.sleep(60)"], number=1500)
        until(lambda: len(descendants(process.pid)) == 1)
        link.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_command_that_ignores_sigterm_is_killed_by_order(tmp_path):
    process, link = _sleeping(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    link.send_bytes(supervisor.KILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    link.close()


def test_command_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script += "; open(sys.argv[1], 'w'); time.sleep(60)"
    path = tmp_path / "sleeps"
    process, link = _run([sys.executable, "-c", script, str(path)], grace_s=0.2)
    until(path.exists)
    link.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL


def test_order_to_a_supervisor_that_is_still_starting_is_obeyed():
    process, link = _run([sys.executable, "-c", "import time; time.sleep(60)"])
    link.send_bytes(supervisor.KILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    link.close()


def test_killed_supervisor_takes_the_command_along(tmp_path):
    process, link = _sleeping(tmp_path)
    (command,) = descendants(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    until(lambda: not lives(command))
    link.close()
