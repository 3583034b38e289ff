"""The supervisor: nothing of its command outlives the owner, however the owner ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from inference.server import supervisor
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


def _run(command: list[str], *, lifeline: int | None = None) -> tuple[subprocess.Popen[bytes], int]:
    read_end, write_end = os.pipe()
    if lifeline is not None:
        os.dup2(read_end, lifeline)
        os.close(read_end)
        read_end = lifeline
    process = subprocess.Popen(
        [sys.executable, supervisor.__file__, str(read_end), "", *command],
        pass_fds=[read_end],
        start_new_session=True,
    )
    os.close(read_end)
    return process, write_end


def _family(tmp_path: Path, seconds: float) -> tuple[subprocess.Popen[bytes], int, int]:
    path = tmp_path / "pid"
    process, lifeline = _run([sys.executable, "-c", FAMILY, str(path), str(seconds)])
    until(lambda: path.exists() and path.read_text() != "")
    return process, lifeline, int(path.read_text())


def _sleeping(tmp_path: Path, first: str = "") -> tuple[subprocess.Popen[bytes], int]:
    """Start a command and return once it has done what comes first, and sleeps."""
    path = tmp_path / "sleeps"
    script = f"import signal, sys, time\n{first}\nopen(sys.argv[1], 'w')\ntime.sleep(60)"
    process, lifeline = _run([sys.executable, "-c", script, str(path)])
    until(path.exists)
    return process, lifeline


def test_status_is_passed_on_and_grandchildren_end(tmp_path: Path) -> None:
    process, lifeline, grandchild = _family(tmp_path, 0.1)
    assert process.wait(LIMIT_S) == 7
    assert not lives(grandchild)
    os.close(lifeline)


def test_a_process_may_have_any_bytes_for_a_name() -> None:
    # The kernel cuts a name after 15 bytes, also within a character.
    rename = "open('/proc/self/comm', 'wb').write(b'a) R 1 \\xff'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state = supervisor.process_state(process.pid)
        assert state is not None
        assert state.parent == os.getpid()
        process.kill()


def test_closed_lifeline_ends_command_and_grandchildren(tmp_path: Path) -> None:
    process, lifeline, grandchild = _family(tmp_path, 60)
    os.close(lifeline)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not lives(grandchild)


def test_a_lifeline_of_an_owner_with_many_files(tmp_path: Path) -> None:
    """select() refuses descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        process, lifeline = _run(
            [sys.executable, "-c", "import time; time.sleep(60)"], lifeline=1500
        )
        until(lambda: len(supervisor.descendants(process.pid)) == 1)
        os.close(lifeline)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_command_that_ignores_sigterm_is_killed_on_sigquit(tmp_path: Path) -> None:
    process, lifeline = _sleeping(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    process.send_signal(signal.SIGQUIT)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    os.close(lifeline)


def test_killed_supervisor_takes_the_command_along(tmp_path: Path) -> None:
    process, lifeline = _sleeping(tmp_path)
    (command,) = supervisor.descendants(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    until(lambda: not lives(command))
    os.close(lifeline)


def _stub(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start what looks like the process of a model `gpt`."""
    script = tmp_path / "repository" / "gpt" / "1" / "model.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    name = "open('/proc/self/comm', 'w').write('triton_python_b')"
    script.write_text(f"import time; {name}; time.sleep(60)")
    return subprocess.Popen(["triton_python_backend_stub", str(script)], executable=sys.executable)


def _program(process: subprocess.Popen[bytes]) -> str:
    return getattr(supervisor.process_state(process.pid), "program", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(LIMIT_S)


def _knows(watch: supervisor.ServerWatch, process: subprocess.Popen[bytes]) -> bool:
    watch.loss()
    return process.pid in watch._models


def test_process_that_completed_a_configuration_is_not_missed(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    first = _stub(tmp_path)
    until(lambda: _knows(watch, first))
    _end(first)
    second = _stub(tmp_path)
    try:
        until(lambda: _knows(watch, second) and first.pid not in watch._models)
        watch.is_ready = True
        assert watch.loss() is None
    finally:
        _end(second)
    until(lambda: f"process {second.pid} of model gpt" in (watch.loss() or ""))


def test_a_configuration_completed_just_before_readiness_is_not_missed(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    first = _stub(tmp_path)
    until(lambda: _knows(watch, first))
    _end(first)
    second = _stub(tmp_path)
    try:
        until(lambda: supervisor.model_of(second.pid) == "gpt")
        watch.is_ready = True  # and nothing was looked at since the first one ended
        assert watch.loss() is None
        watch._looked = float("-inf")
        assert watch.loss() is None
    finally:
        _end(second)
    watch._looked = float("-inf")
    assert f"process {second.pid} of model gpt" in (watch.loss() or "")


def test_model_lost_while_others_load_is_reported_once_all_have(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    process = _stub(tmp_path)
    until(lambda: _knows(watch, process))
    _end(process)
    until(lambda: not _knows(watch, process))
    watch.is_ready = True
    assert f"process {process.pid} of model gpt" in (watch.loss() or "")


def test_model_lost_before_it_was_seen_is_reported(tmp_path: Path) -> None:
    """The last model starts after the last scan, and ends right after readiness."""
    watch = supervisor.ServerWatch(os.getpid())
    assert watch.loss() is None
    process = _stub(tmp_path)
    until(lambda: supervisor.model_of(process.pid) == "gpt")
    watch.is_ready = True
    assert watch.loss() is None
    process.kill()
    until(lambda: "was ended by SIGKILL" in (watch.loss() or ""), limit_s=2.0)
    process.wait(LIMIT_S)


def test_model_that_ended_before_the_first_scan_is_reported(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    assert watch.loss() is None
    process = _stub(tmp_path)
    until(lambda: _program(process) == "triton_python_b")
    process.kill()
    until(lambda: getattr(supervisor.process_state(process.pid), "letter", "") == "Z")
    watch.is_ready = True
    until(lambda: "was ended by SIGKILL" in (watch.loss() or ""), limit_s=2.0)
    process.wait(LIMIT_S)
