"""An evaluation that has the server of another run load its weights: whose answers they are."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundations.files.lock import folder_lock
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.run import served_model
from inference.evaluation.task import EvaluationError
from stages import evaluate
from stages.base import JobSettings, StageError
from stages.deploy_config import DeployConfig, problems_of_exchange
from stages.endpoint import ENDPOINT_NAME, RELOAD_NAME, ServerEndpoint
from stages.evaluate import EvaluateStage, NotEvaluatedError
from stages.progress import Progress
from stages.record import JobRecord, write_record
from tests.waiting import until

MINE, OTHERS = {"checkpoint": "mine"}, {"checkpoint": "other"}
ENDPOINT = ServerEndpoint("127.0.0.1", 8, 9, 10, "gpt", None, "7", 1, 1, "2026-01-01T00:00:00Z")


class Server:
    """A deploy job of another run, by its published address; it takes weights once it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.says = ["mine"]  # what the server itself says it serves, each time it is asked
        self.asked: list[str] = []

    def publish(self, served: dict[str, str], **changes: Any) -> None:
        replace(ENDPOINT, served=served, **changes).publish(self.folder / ENDPOINT_NAME)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Server:
    folder = tmp_path / "deploy"
    folder.mkdir()
    made = Server(folder)
    write_record(folder / "job.json", JobRecord("7", "deploy", "d", "running"))

    def says(*_: Any) -> str:
        answer = made.says.pop(0) if len(made.says) > 1 else made.says[0]
        if answer == "nothing":
            raise EvaluationError("it does not answer")
        return answer

    monkeypatch.setattr(evaluate, "checkpoint_hash", lambda _: "mine")
    monkeypatch.setattr(evaluate, "_POLL_S", 0.01)
    monkeypatch.setattr(served_model, "served_checkpoint", says)
    return made


@contextmanager
def asked(tmp_path: Path, server: Server, **changes: Any) -> Iterator[EvaluateStage]:
    output = tmp_path / "report"
    output.mkdir()
    deploy = DeployConfig(folder=tmp_path / "mine", model_name="gpt", **changes)
    options = EvaluationOptions(output_dir=output, data_dir=tmp_path, shared_server=server.folder)
    stage = EvaluateStage(
        JobSettings("evaluate", tmp_path),
        options,
        deploy,
        endpoint_path=server.folder / ENDPOINT_NAME,
    )
    with stage._server(Progress()):
        (output / "report.json").write_text("{}")
        yield stage


def test_the_server_is_asked_for_the_weights_of_this_run(tmp_path, server):
    server.publish(OTHERS)
    request = server.folder / RELOAD_NAME

    def take() -> None:
        until(request.is_file, "a request")
        server.asked.append(request.read_text())
        request.unlink()
        server.publish(OTHERS, restarts=1)  # it failed, and was started again as it was
        until(request.is_file, "a further request")
        server.publish(MINE, restarts=1)

    taking = threading.Thread(target=take)
    taking.start()
    with asked(tmp_path, server) as stage:
        assert not stage.stops_server
    taking.join()
    assert server.asked == [str(tmp_path / "mine")]
    assert (tmp_path / "report" / "report.json").is_file()


@pytest.mark.parametrize("later", ["other", "nothing", ""])
def test_answers_of_other_weights_are_no_report(tmp_path, server, later):
    server.publish(MINE)
    server.says = ["mine", later]
    with pytest.raises(NotEvaluatedError, match=r"this run's are mine"), asked(tmp_path, server):
        pass
    assert not (tmp_path / "report" / "report.json").exists()


def test_a_breached_gate_of_other_weights_is_no_verdict(tmp_path, server):
    server.publish(MINE)
    with pytest.raises(StageError, match="breached"), asked(tmp_path, server):
        raise StageError("breached", exit_code=3)
    assert (tmp_path / "report" / "report.json").exists()
    server.says = ["mine", "other"]
    (tmp_path / "report" / "report.json").unlink()
    (tmp_path / "report").rmdir()
    with pytest.raises(NotEvaluatedError), asked(tmp_path, server):
        raise StageError("breached", exit_code=3)
    assert not (tmp_path / "report" / "report.json").exists()


def test_a_server_that_another_evaluation_asks_is_left_alone(tmp_path, server):
    server.publish(OTHERS)
    with (
        folder_lock(server.folder / ".in_use.lock", "busy"),
        pytest.raises(NotEvaluatedError, match="is in use by another evaluation"),
        asked(tmp_path, server),
    ):
        pass
    assert not (server.folder / RELOAD_NAME).exists()


def test_a_server_that_does_not_take_the_weights_is_waited_for_so_long(tmp_path, server):
    server.publish(OTHERS)
    text = r"has not loaded .*/mine within deploy\.ready_timeout_s=0\.1 s"
    with (
        pytest.raises(NotEvaluatedError, match=text),
        asked(tmp_path, server, ready_timeout_s=0.1),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"engine": "vllm"}, "deploy.engine=vllm: "),
        ({"server": "tritonserver"}, "deploy.server=tritonserver: "),
        ({"server": "pytriton"}, "deploy.server=pytriton: "),
        ({"nodes": 2}, "a model over 2 nodes: "),
    ],
)
def test_servers_whose_weights_cannot_be_exchanged_are_refused_by_name(changes, text):
    (problem,) = problems_of_exchange(DeployConfig(folder=Path(), model_name="m", **changes))
    assert problem.startswith(text)
    assert problem.endswith("use deploy.server=slipway on one node, or watch.exchange=false.")
