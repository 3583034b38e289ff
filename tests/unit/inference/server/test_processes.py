"""The processes of a server: a lost model and a stopped process are found, and nothing else."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.server.processes import ServerWatch, model_of, process_state
from tests.waiting import LIMIT_S, until

STUB = "triton_python_backend_stub"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run what looks like the process of a model `gpt`."""
    script = tmp_path / "repository" / "gpt" / "1" / "model.py"
    script.parent.mkdir(parents=True)
    script.write_text("import time; time.sleep(60)")
    process = subprocess.Popen([STUB, str(script)], executable=sys.executable)
    until(lambda: model_of(process.pid) == "gpt")
    yield process
    process.kill()
    process.wait(LIMIT_S)


def test_a_process_may_have_any_bytes_for_a_name():
    # The kernel cuts a name after 15 bytes, also within a character.
    rename = "open('/proc/self/comm', 'wb').write(b'a) R 1 \\xff'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state = process_state(process.pid)
        assert state is not None
        assert state.parent == os.getpid()
        process.kill()


def test_a_models_process_that_ends_is_a_loss_with_its_reason(
    stub,
):
    watch = ServerWatch(os.getpid(), names=model_of)
    assert watch.loss() is None
    stub.kill()
    expected = f"process {stub.pid} of model gpt was ended by SIGKILL"
    until(lambda: (watch.loss() or "").startswith(expected))
    stub.wait(LIMIT_S)
    assert watch.loss() == f"process {stub.pid} of model gpt has ended"


def test_the_end_of_another_process_is_no_loss(stub):
    watch = ServerWatch(os.getpid())
    assert watch.loss() is None
    stub.kill()
    stub.wait(LIMIT_S)
    assert watch.loss() is None


def test_any_process_that_stays_stopped_is_a_loss(stub):
    watch = ServerWatch(os.getpid())
    assert watch.loss() is None
    stub.send_signal(signal.SIGSTOP)
    until(lambda: watch.loss() == f"process {stub.pid} has been stopped for 1 s")
    stub.send_signal(signal.SIGCONT)
    until(lambda: watch.loss() is None)
