"""Passages, models and reports of the evaluation tests."""

from pathlib import Path

import pytest

from inference.evaluation.gate import GateResult
from inference.evaluation.record import Report, RequestStatistics, RunFacts, TaskReport
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import Dataset, Metric, Prediction
from tests.fake_model import FakeModel, partly_right_model, write_passages


@pytest.fixture
def fake_model() -> type[FakeModel]:
    return FakeModel


@pytest.fixture
def passages(tmp_path) -> Path:
    return write_passages(tmp_path / "passages.jsonl")


@pytest.fixture
def model() -> FakeModel:
    return partly_right_model()


def make_metric(name: str = "lambada_last_word", value: float = 0.5, **changes: object) -> Metric:
    values: dict[str, object] = {
        "name": name,
        "key": "acc",
        "value": value,
        "stderr": 0.05,
        "low": max(0.0, value - 0.1),
        "high": value + 0.1,
        "count": 100,
        "method": "counted",
        "sample_value": name,
    }
    return Metric(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(name="make_metric")
def _make_metric():
    return make_metric


@pytest.fixture
def report() -> Report:
    metric = make_metric()
    requests = RequestStatistics(
        count=8,
        concurrency=2,
        seconds=1.0,
        per_s=8.0,
        latency=distribution([0.01 * each for each in range(1, 9)]),
    )
    task = TaskReport(
        name="lambada",
        version=1,
        dataset=Dataset("passages.jsonl", "/data/passages.jsonl", "ab" * 32, 100, 100),
        metrics=(metric,),
        seconds=1.0,
        requests=requests,
        through="text through ensemble",
    )
    return Report(
        run_id="sample_2024-01-02_03-04-05_abc",
        run=RunFacts(name="sample", data_type="fp32", tp_size=2),
        started_at="2024-01-02T03:04:05+00:00",
        seconds=1.5,
        tasks=(task,),
        gate=GateResult(),
    )


@pytest.fixture
def predictions() -> tuple[Prediction, ...]:
    return (
        Prediction(
            "lambada", 0, "The cook lit the", "lamp", " lamp", {"lambada_last_word": 1.0}, 0.02
        ),
        Prediction(
            "lambada", 1, "</script><b>& the", "<gate>", " key", {"lambada_last_word": 0.0}, 0.03
        ),
    )
