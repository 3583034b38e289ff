"""The supervisor: nothing of its command outlives the owner, however the owner ends."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from inference.server import supervisor
from inference.supervision import REPORTS_VARIABLE
from tests.conftest import ROOT
from tests.waiting import LIMIT_S, lives, until

STUB = "triton_python_backend_stub"
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
    command: list[str], *, number: int | None = None, reports: str = ""
) -> tuple[subprocess.Popen[bytes], Connection]:
    link, other = Pipe()
    number = os.dup(other.fileno()) if number is None else os.dup2(other.fileno(), number)
    other.close()
    process = subprocess.Popen(
        [*supervisor.PROGRAM, str(number), "", *command],
        env={**os.environ, REPORTS_VARIABLE: reports},
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


def test_status_is_passed_on_and_grandchildren_end(tmp_path: Path) -> None:
    process, link, grandchild = _family(tmp_path, 0.1)
    assert process.wait(LIMIT_S) == 7
    assert not lives(grandchild)
    link.close()


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


def test_closed_link_ends_command_and_grandchildren(tmp_path: Path) -> None:
    process, link, grandchild = _family(tmp_path, 60)
    link.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not lives(grandchild)


def test_a_link_of_an_owner_with_many_files() -> None:
    """select() refuses descriptors from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        process, link = _run([sys.executable, "-c", "import time; time.sleep(60)"], number=1500)
        until(lambda: len(supervisor.descendants(process.pid)) == 1)
        link.close()
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_command_that_ignores_sigterm_is_killed_by_order(tmp_path: Path) -> None:
    process, link = _sleeping(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    link.send_bytes(supervisor.KILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    link.close()


def test_order_to_a_supervisor_that_is_still_starting_is_obeyed() -> None:
    process, link = _run([sys.executable, "-c", "import time; time.sleep(60)"])
    link.send_bytes(supervisor.KILL)
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
    link.close()


def test_killed_supervisor_takes_the_command_along(tmp_path: Path) -> None:
    process, link = _sleeping(tmp_path)
    (command,) = supervisor.descendants(process.pid)
    process.kill()
    process.wait(LIMIT_S)
    until(lambda: not lives(command))
    link.close()


def _program(pid: int) -> str:
    return getattr(supervisor.process_state(pid), "program", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(LIMIT_S)
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # the next process starts in a later tick


def _knows(watch: supervisor.ServerWatch, process: subprocess.Popen[bytes]) -> bool:
    """Return whether a watch knows that a process runs a model, and has not ended."""
    watch.loss()
    return any(
        each.pid == process.pid and each.model and not each.has_ended
        for each in watch._known.values()
    )


def _model(tmp_path: Path) -> Path:
    """Write the script of a model `gpt`, whose process has the name of Triton's."""
    script = tmp_path / "repository" / "gpt" / "1" / "model.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    name = "open('/proc/self/comm', 'w').write('triton_python_b')"
    script.write_text(f"import time; {name}; time.sleep(60)")
    return script


def _stub(tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start what looks like the process of a model `gpt`."""
    return subprocess.Popen([STUB, str(_model(tmp_path))], executable=sys.executable)


@pytest.mark.parametrize("has_reported", [False, True])
def test_owner_is_sent_why_a_model_has_ended(tmp_path: Path, has_reported: bool) -> None:
    reports, reason = tmp_path / "reports", "gpt is out of service: \U0001f3d6"
    words = [STUB, str(_model(tmp_path))]
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({words!r}, executable=sys.executable)\ntime.sleep(60)"
    )
    process, link = _run([sys.executable, "-c", script], reports=str(reports))
    until(lambda: "triton_python_b" in map(_program, supervisor.descendants(process.pid)))
    model = supervisor.descendants(process.pid)[-1]
    link.send_bytes(supervisor.READY)
    if has_reported:  # from an interpreter whose texts are ASCII, as that of tritonserver may be
        report = f"from inference.supervision import report_end; assert report_end({reason!a})"
        subprocess.run(
            [sys.executable, "-X", "utf8=0", "-c", report],
            env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", REPORTS_VARIABLE: str(reports)},
            cwd=ROOT,
            check=True,
        )
    os.kill(model, signal.SIGKILL)
    said = link.recv_bytes().decode()
    assert said.startswith(reason if has_reported else f"process {model} of")
    assert process.wait(LIMIT_S) == 128 + signal.SIGKILL


def test_process_that_completed_a_configuration_is_not_missed(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    first = _stub(tmp_path)
    until(lambda: _knows(watch, first))
    _end(first)
    second = _stub(tmp_path)
    try:
        until(lambda: _knows(watch, second) and not _knows(watch, first))
        watch.is_ready = True
        assert watch.loss() is None
    finally:
        _end(second)
    until(lambda: f"process {second.pid} of model gpt" in (watch.loss() or ""))


@pytest.mark.parametrize("in_one_tick", [False, True])
def test_a_configuration_completed_just_before_readiness_is_not_missed(
    tmp_path: Path, in_one_tick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_one_tick:
        state_of = supervisor.process_state

        def in_tick(pid: int) -> supervisor.ProcessState | None:
            return (state := state_of(pid)) and replace(state, started=7)

        monkeypatch.setattr(supervisor, "process_state", in_tick)
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


def test_a_configuration_completed_is_not_missed_where_its_model_starts_last(
    tmp_path: Path,
) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    first = _stub(tmp_path)
    until(lambda: _knows(watch, first))
    _end(first)
    until(lambda: not _knows(watch, first))
    second = _stub(tmp_path)
    try:
        until(lambda: supervisor.model_of(second.pid) == "gpt")
        watch.is_ready = True  # and nothing has been searched for since the second one started
        assert watch.loss() is None
    finally:
        _end(second)


def test_the_end_of_a_process_that_runs_no_model_is_no_loss() -> None:
    watch = supervisor.ServerWatch(os.getpid())
    watch.is_ready = True
    process = subprocess.Popen(
        [STUB, "-c", "import time; time.sleep(60)"], executable=sys.executable
    )
    until(lambda: b"-c" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    watch._scanned = float("-inf")
    assert watch.loss() is None
    _end(process)
    watch._looked = float("-inf")
    assert watch.loss() is None


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


def test_model_that_ended_unidentified_while_others_load_is_reported(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    assert watch.loss() is None
    process = _stub(tmp_path)
    until(lambda: _program(process.pid) == "triton_python_b")
    state = supervisor.process_state(process.pid)
    assert state is not None
    # As a scan before its program had begun leaves it.
    watch._known[state.started, process.pid] = supervisor._Process(process.pid, state.started)
    process.kill()
    until(lambda: getattr(supervisor.process_state(process.pid), "letter", "") == "Z")
    watch._looked = float("-inf")
    assert watch.loss() is None
    watch.is_ready = True
    until(lambda: "was ended by SIGKILL" in (watch.loss() or ""), limit_s=2.0)
    process.wait(LIMIT_S)


def test_model_that_ended_before_the_first_scan_is_reported(tmp_path: Path) -> None:
    watch = supervisor.ServerWatch(os.getpid())
    assert watch.loss() is None
    process = _stub(tmp_path)
    until(lambda: _program(process.pid) == "triton_python_b")
    process.kill()
    until(lambda: getattr(supervisor.process_state(process.pid), "letter", "") == "Z")
    watch.is_ready = True
    until(lambda: "was ended by SIGKILL" in (watch.loss() or ""), limit_s=2.0)
    process.wait(LIMIT_S)
