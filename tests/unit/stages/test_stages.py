"""Checks, messages and outputs of each stage, without the heavy work."""

import json
import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions
from inference.front.access import OpenAIOptions
from stages.base import JobSettings, Stage, StageError, Summary
from stages.deploy import DeployStage
from stages.deploy_config import DeployConfig, check_deploy
from stages.endpoint import ServerEndpoint, read_endpoint
from stages.evaluate import EvaluateStage, NotEvaluatedError
from stages.progress import DamagedFileError, Progress, read_progress, write_json
from stages.record import JobRecord, read_record, update_record, write_record
from stages.step import JobStep, run_in_step


class CopyStage(Stage):
    """Copies one file to another."""

    name = "copy"

    def __init__(self, job: JobSettings, source: Path, *, guards_inputs: bool = False) -> None:
        super().__init__(job)
        self.source = source
        self.is_guarded = guards_inputs
        self.mode = "plain"

    @property
    def target(self) -> Path:
        return self.job.folder / "target.txt"

    def check(self) -> list[str]:
        return []

    def outputs(self) -> list[Path]:
        return [self.target]

    def inputs(self) -> list[Path]:
        return [self.source]

    def identity(self) -> dict[str, Any]:
        return {"copy.mode": self.mode}

    def marker_path(self) -> Path:
        return self.job.folder / "target.json"

    def run(self, progress: Progress) -> Summary:
        progress.update("copying")
        if not self.source.exists():
            raise StageError(f"{self.source} is gone", summary={"tried": 1})
        self.target.write_bytes(self.source.read_bytes())
        return {"size_bytes": self.source.stat().st_size}


@pytest.fixture
def stage(tmp_path) -> CopyStage:
    source = tmp_path / "source.txt"
    source.write_text("one")
    return CopyStage(JobSettings("copy", tmp_path / "copy"), source)


def server(tmp_path: Path, **changes: Any) -> DeployConfig:
    return replace(DeployConfig(folder=tmp_path, model_name="m"), **changes)


def evaluation(tmp_path: Path, *, server_url: str | None = None, **changes: Any) -> EvaluateStage:
    options = EvaluationOptions(
        output_dir=tmp_path / "report", server=server_url, data_dir=tmp_path
    )
    job = JobSettings("evaluate", tmp_path / "evaluate")
    return EvaluateStage(job, options, server(tmp_path), **changes)


def test_stages_can_be_pickled(stage, tmp_path):
    for each in (evaluation(tmp_path), DeployStage(stage.job, server(tmp_path))):
        again = pickle.loads(pickle.dumps(each))
        assert again.identity() == each.identity()


def test_marker_distinguishes_finished_work_from_missing(stage):
    assert stage.finding().marker is None
    summary = stage()
    assert stage.finding().marker is not None
    stage.target.unlink()
    assert stage.finding().marker is None
    assert summary == {"size_bytes": 3}


def test_other_configuration_is_named_with_both_values(stage):
    stage()
    stage.mode = "fancy"
    finding = stage.finding()
    assert finding.marker is None
    assert finding.problems[0].startswith("copy.mode=fancy differs from plain, with which ")
    assert str(stage.target) in finding.problems[0]


def test_changed_input_makes_unguarded_work_missing(stage):
    stage()
    stage.source.write_text("another")
    assert stage.finding().marker is None
    assert stage.finding().changes == [f"{stage.source} has changed since"]


def test_a_file_exchanged_for_an_older_one_of_its_size_is_a_change(stage, tmp_path):
    stage.source = tmp_path / "folder"
    stage.source.mkdir()
    for name, seconds in (("weights", 20), ("tokenizer", 30)):
        (stage.source / name).write_text(name)
        os.utime(stage.source / name, (seconds, seconds))
    stage.mark_finished({})
    stage.target.touch()
    assert stage.finding().marker is not None
    os.utime(stage.source / "weights", (10, 10))
    assert stage.finding().changes == [f"{stage.source} has changed since"]


def test_changed_input_of_guarded_work_is_a_conflict(stage, monkeypatch):
    stage()
    stage.source.write_text("another")
    monkeypatch.setattr(CopyStage, "guards_inputs", True)
    (problem,) = stage.finding().problems
    assert problem.startswith(f"{stage.source} has changed since")


NO_INPUTS = '{"finished_at": "now", "identity": {}, "inputs": 5, "summary": {}}'


@pytest.mark.parametrize("text", ["{}", "[]", "{", NO_INPUTS])
def test_marker_that_is_damaged_is_named(stage, text):
    stage()
    stage.marker_path().write_text(text)
    with pytest.raises(DamagedFileError, match=r"target\.json is damaged"):
        stage.finding()


def test_marker_is_written_last(stage):
    stage.source.unlink()
    with pytest.raises(StageError):
        stage()
    assert not stage.marker_path().exists()


def test_progress_is_read_whole_or_not_at_all(tmp_path):
    path = tmp_path / "progress.json"
    assert read_progress(path).phase == ""
    Progress(path).update("loading", done=1, total=2)
    assert read_progress(path).total == 2
    assert [each.name for each in tmp_path.iterdir()] == ["progress.json"]


def test_record_of_another_job_is_left_alone(tmp_path):
    path = tmp_path / "job.json"
    write_record(path, JobRecord("2", "copy", "copy", "running"))
    assert update_record(path, "1", state="failed") is None
    assert update_record(path, "2", state="completed") is not None
    found = read_record(path)
    assert found is not None
    assert found.state == "completed"


def test_record_from_a_newer_version_can_be_read(tmp_path):
    values = {"job_id": "1", "stage": "s", "name": "n", "state": "running", "colour": "blue"}
    write_json(tmp_path / "job.json", values)
    found = read_record(tmp_path / "job.json")
    assert found is not None
    assert found.state == "running"


def test_step_runs_the_stage_elsewhere_and_brings_the_summary(stage):
    step = JobStep(("env", f"PYTHONPATH={Path(__file__).parent}:{Path.cwd()}"), sys.executable)
    assert run_in_step(stage, step, folder=stage.job.folder / "step") == {"size_bytes": 3}


def test_failure_inside_a_step_keeps_its_words(stage):
    stage.source.unlink()
    step = JobStep(("env", f"PYTHONPATH={Path(__file__).parent}:{Path.cwd()}"), sys.executable)
    with pytest.raises(StageError, match=r"source\.txt is gone") as caught:
        run_in_step(stage, step, folder=stage.job.folder / "step")
    assert caught.value.summary == {"tried": 1}


def test_step_without_a_result_names_its_command(stage):
    with pytest.raises(StageError, match=r"ended with status 1 and without a result.*false"):
        run_in_step(stage, JobStep(("false",)), folder=stage.job.folder / "step")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp_size": 4, "pp_size": 2, "local_gpus": 4}, "need 8 GPUs, and this machine shows 4"),
        ({"grpc_port": 8000}, "the ports must differ"),
        ({"openai": OpenAIOptions(port=8001, enabled=True)}, "the ports must differ"),
        (
            {"openai": OpenAIOptions(tokenizer=Path("/nowhere"), enabled=True)},
            "deploy.openai.tokenizer=/nowhere is not a folder",
        ),
        (
            {"repository": "there"},
            "holds no model (<name>/config.pbtxt); give the folder above",
        ),
        (
            {"serves_here": True, "host": "192.0.2.1"},
            "deploy.host=192.0.2.1: ports cannot be opened on 192.0.2.1: ",
        ),
    ],
)
def test_server_configuration_is_checked(tmp_path, changes, text):
    (problem,) = check_deploy(server(tmp_path, **changes))
    assert text in problem


def test_repository_from_elsewhere_needs_no_more_than_a_model(tmp_path):
    (tmp_path / "any").mkdir()
    (tmp_path / "any" / "config.pbtxt").touch()
    assert not [*check_deploy(server(tmp_path, repository="there"))]


def test_free_ports_may_be_asked_for_three_times(tmp_path):
    assert not [*check_deploy(server(tmp_path, http_port=0, grpc_port=0, metrics_port=0))]


def test_server_is_never_finished_earlier(tmp_path):
    stage = DeployStage(JobSettings("deploy", tmp_path), server(tmp_path))
    assert stage.finding().marker is None


@pytest.mark.parametrize("text", ["here", "host:", ":80", "host:99999", "http://host:80x"])
def test_address_of_a_server_has_a_host_and_a_port(tmp_path, text):
    (problem,) = [each for each in evaluation(tmp_path, server_url=text).check() if text in each]
    assert "write host:port" in problem


@pytest.mark.parametrize("is_stale", [False, True])
def test_evaluation_waits_for_the_published_address_only_so_long(tmp_path, is_stale):
    stage = evaluation(tmp_path, endpoint_path=tmp_path / "endpoint.json")
    if is_stale:
        write_record(tmp_path / "job.json", JobRecord("7", "deploy", "d", "running"))
        old = ServerEndpoint("127.0.0.1", 8, 9, 10, "gpt", None, "6", 1, 1, "2024-01-01T00:00:00Z")
        old.publish(tmp_path / "endpoint.json")
    stage.deploy = server(tmp_path, ready_timeout_s=0.2)
    started = time.monotonic()
    with pytest.raises(NotEvaluatedError, match=r"deploy\.ready_timeout_s=0\.2"):
        stage()
    assert time.monotonic() - started < 10


def test_evaluation_does_not_wait_for_a_server_that_has_failed(tmp_path):
    write_record(tmp_path / "job.json", JobRecord("7", "deploy", "d", "failed"))
    stage = evaluation(tmp_path, endpoint_path=tmp_path / "endpoint.json")
    with pytest.raises(NotEvaluatedError, match="the server's job 7 has failed"):
        stage()


def test_data_that_cannot_be_used_is_an_evaluation_that_was_not_done(tmp_path):
    data_path = tmp_path / "passages.jsonl"
    data_path.write_text("{}\n")
    stage = evaluation(tmp_path, server_url="127.0.0.1:9")
    options = replace(stage.options, lambada=LambadaOptions(data_path=data_path))
    stage.options = options
    with pytest.raises(NotEvaluatedError, match="is not a data set of this form"):
        stage()
    assert (Path(options.output_dir) / "junit.xml").is_file()


def test_evaluation_lets_the_server_of_the_pipeline_end_unless_it_may_be_requeued(
    tmp_path, monkeypatch
):
    write_record(tmp_path / "job.json", JobRecord("7", "deploy", "d", "failed"))
    stage = evaluation(tmp_path, endpoint_path=tmp_path / "endpoint.json", stops_server=True)
    for signal in (KeyboardInterrupt, SystemExit):
        with monkeypatch.context() as patch:
            patch.setattr(stage, "_server", Mock(side_effect=signal))
            with pytest.raises(signal):
                stage()
    assert not (tmp_path / "stop_requested").exists()
    with pytest.raises(NotEvaluatedError):
        stage()
    assert (tmp_path / "stop_requested").exists()


def test_report_of_another_configuration_is_set_aside(tmp_path):
    stage = evaluation(tmp_path, endpoint_path=tmp_path / "endpoint.json")
    report = stage.outputs()[0]
    report.parent.mkdir()
    report.write_text("{}")
    stage.mark_finished({})
    assert stage.finding().marker is not None
    again = replace(stage, options=replace(stage.options, limit=3))
    assert again.finding().marker is None
    write_record(tmp_path / "job.json", JobRecord("7", "deploy", "d", "failed"))
    with pytest.raises(NotEvaluatedError):
        again()
    assert json.loads((tmp_path / "report.1" / "report.json").read_text()) == {}


def test_no_address_is_no_endpoint(tmp_path):
    assert read_endpoint(tmp_path / "endpoint.json") is None
