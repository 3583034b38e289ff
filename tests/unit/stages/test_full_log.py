"""Jobs whose log lies on a full disk, where not a line can be written."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from stages import job_process, service, step
from stages.base import JobSettings
from stages.deploy import DeployStage
from stages.deploy_config import DeployConfig
from stages.endpoint import STOP_NAME, ServerEndpoint
from tests.unit.stages.test_service import FakeServer, new_service


@contextmanager
def full_log() -> Iterator[None]:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            del text
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with redirect_stdout(Full()), redirect_stderr(Full()):
        yield


def test_server_that_failed_is_started_again(tmp_path, monkeypatch):
    servers: list[FakeServer] = []

    class Failing(FakeServer):
        def failure(self) -> str:  # type: ignore[override]
            return "it has failed"

    @contextmanager
    def serving(*_: Any, **__: Any) -> Iterator[Any]:
        servers.append((FakeServer if servers else Failing)(tmp_path / "log"))
        if len(servers) == 2:
            (tmp_path / STOP_NAME).touch()
        yield servers[-1], ServerEndpoint("here", 1, 2, 3, "m", None, "7", 1, 1, "now")

    monkeypatch.setattr(service, "serving", serving)
    kept = new_service(tmp_path, DeployConfig(folder=tmp_path, model_name="m"))
    with full_log():
        assert kept.run() == "no longer needed"
    assert len(servers) == 2


def test_output_of_a_step_is_read_to_its_end():
    lines = "0: some words\n" * 1000 + "srun: error: n2: task 1: Exited with exit code 3\n"
    with full_log(), step._OutputReader(io.StringIO(lines)) as listener:
        pass
    assert listener.loss() == "rank 1 on n2 ended: Exited with exit code 3; its last lines:"


def test_server_that_cannot_be_asked_to_end_is_ended_otherwise(tmp_path):
    folder = tmp_path / "gone"  # in which no file can be made, either
    stage = DeployStage(
        JobSettings("deploy", folder), DeployConfig(folder=tmp_path, model_name="m")
    )
    assert not stage.ask_to_stop()
    folder.mkdir()
    os.mkfifo(folder / STOP_NAME)
    assert stage.ask_to_stop()
    assert (folder / STOP_NAME).read_text(encoding="utf-8") == job_process.job_id_here()
