"""The record and its files: nothing is lost on the way to disk and back."""

import json
from dataclasses import asdict, replace
from xml.etree import ElementTree as ET

import pytest

from foundations.files.json_content import record_in
from inference.evaluation.gate import Measured, apply_gate
from inference.evaluation.options import Bound
from inference.evaluation.record import (
    LatencyPoint,
    StageTiming,
    read_predictions,
    read_report,
)
from inference.evaluation.report.files import (
    FILE_NAMES,
    junit_text,
    metrics_text,
    write_report,
)


@pytest.fixture
def full(report, make_metric):
    bounds = {"lambada_last_word": Bound(min=0.6)}
    latency = report.tasks[0].requests.latency
    return replace(
        report,
        run=replace(report.run, stages=(StageTiming("convert", "completed", 2.0),)),
        latency=(LatencyPoint(1, 32, 8, 1, 4, 32, latency, 100.0, 9.0, 1.0),),
        bounds=bounds,
        gate=apply_gate(map(Measured, report.metrics), bounds),
        baseline={"lambada_last_word": make_metric(value=0.55)},
    )


def test_a_report_reads_back_equal(full, predictions, tmp_path):
    write_report(tmp_path, full, predictions)
    assert read_report(tmp_path / "report.json") == full
    assert tuple(read_predictions(tmp_path / "predictions.jsonl")) == predictions
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(FILE_NAMES)


def test_a_report_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text('{"schema_version": 99}')
    with pytest.raises(ValueError, match="has schema_version 99; this version reads 1"):
        read_report(path)


def test_invalid_reports_are_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("report")
    with pytest.raises(ValueError, match="is not a JSON object"):
        read_report(path)
    path.write_text('{"schema_version": 1}')
    with pytest.raises(ValueError, match=r"report\.json is damaged: "):
        read_report(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"tasks": None}, {"tasks": [1]}, {"latency": 5}, {"gate": 5}),
        *({"seconds": "5"}, {"seconds": True}, {"run_id": 5}, {"environment": {"host": None}}),
    ],
)
def test_damaged_reports_are_refused_with_their_path(full, tmp_path, change):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(asdict(full) | change))
    with pytest.raises(ValueError, match=r"report\.json is damaged: "):
        read_report(path)


@pytest.mark.parametrize("text", ['{"task": "lambada", ', "[" * 100_000], ids=["cut", "nested"])
def test_damaged_predictions_are_refused_with_their_path(tmp_path, text):
    path = tmp_path / "predictions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"predictions\.jsonl is damaged"):
        read_predictions(path)


def test_keys_of_a_later_version_are_ignored():
    assert record_in(StageTiming, '{"name": "a", "state": "b", "seconds": 1, "new": 2}').name == "a"


def test_metrics_are_fractions_with_what_they_mean(full):
    values = json.loads(metrics_text(full))["lambada"]
    assert (values["acc"], values["acc_stderr"], values["n"]) == (0.5, 0.05, 100)
    assert values["metric"] == {"acc": "lambada_last_word"}
    assert (values["dtype"], values["tp"], values["pp"]) == ("fp32", 2, None)
    assert values["dataset_sha256"] == "ab" * 32
    assert values["limit"] is None


def test_a_breached_bound_is_a_failure_for_continuous_integration(full):
    root = ET.fromstring(junit_text("a", tasks=full.tasks, gates={"gate": full.gate.verdicts}))
    suites = {suite.get("name"): suite for suite in root}
    assert suites["lambada"].get("failures") == "0"
    assert suites["gate"].get("failures") == "1"
    failure = suites["gate"].find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "lambada_last_word = 0.5 breaches min 0.6"


def test_an_evaluation_that_failed_is_an_error_for_continuous_integration():
    root = ET.fromstring(junit_text("a", errors={"evaluate": "server gone\nsee its log"}))
    assert root[0].get("errors") == "1"
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert (error.get("message"), error.text) == ("server gone", "server gone\nsee its log")


def test_control_characters_of_an_answer_leave_junit_readable():
    root = ET.fromstring(junit_text("a", errors={"evaluate": "502: \x1b[31mgone\x00 \ufffe\tnow"}))
    error = root.find("testsuite/testcase/error")
    assert error is not None
    assert error.text == "502: \ufffd[31mgone\ufffd \ufffd\tnow"


def test_the_markdown_page_shows_value_interval_and_breach(full, predictions, tmp_path):
    write_report(tmp_path, full, predictions)
    page = (tmp_path / "report.md").read_text()
    assert "# sample: gate breached (1 of 1 bounds)" in page
    assert "| lambada_last_word | 50.00% | 40.00% to 60.00% | 100 |" in page
    assert "| lambada_last_word | min 0.6 | critical | breached | 0.5 |" in page
    assert "| convert | completed | 2.0 s |" in page


def test_records_are_plain_json(full):
    assert json.loads(json.dumps(asdict(full)))["schema_version"] == 1
