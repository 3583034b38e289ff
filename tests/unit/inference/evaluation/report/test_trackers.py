"""Reports in experiment trackers, read back by the trackers' own libraries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.evaluation.record import LatencyPoint
from inference.evaluation.report.files import write_report
from inference.evaluation.report.trackers import track
from inference.evaluation.run.timing import distribution

POINT = LatencyPoint(
    batch_size=2,
    input_len=32,
    output_len=8,
    concurrency=4,
    requests=8,
    generated=64,
    latency=distribution([0.02] * 8),
    tokens_per_s=100.0,
    first_token_ms=5.0,
)
PLACE = "latency/in32_out8_batch2_inflight4"


@pytest.fixture
def written(report, predictions, tmp_path):
    """Return a report whose files lie in `tmp_path / "out"`."""
    measured = replace(report, latency=(POINT,))
    (tmp_path / "out").mkdir()
    write_report(tmp_path / "out", measured, predictions)
    return measured


def test_tensorboard_has_a_step_for_each_report(written, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    better = replace(written.tasks[0].metrics[0], value=0.75)
    second = replace(
        written, run_id="second", tasks=(replace(written.tasks[0], metrics=(better,)),)
    )
    for report in (written, second):
        track("tensorboard", report, tmp_path / "out", folder=tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "sample"))
    events.Reload()
    found = {
        name: [(each.step, float(each.tensor_proto.float_val[0])) for each in events.Tensors(name)]
        for name in ("lambada_last_word", f"{PLACE}/p50_ms", f"{PLACE}/tokens_per_s")
    }
    assert found == {
        "lambada_last_word": [(0, 0.5), (1, 0.75)],
        f"{PLACE}/p50_ms": [(0, 20.0), (1, 20.0)],
        f"{PLACE}/tokens_per_s": [(0, 100.0), (1, 100.0)],
    }
    (first, _) = events.Tensors("parameters/text_summary")
    assert b"| data_type | fp32 |" in first.tensor_proto.string_val[0]
    (first, _) = events.Tensors("report/text_summary")
    assert first.tensor_proto.string_val[0].startswith(b"# sample: no gate set")


def test_mlflow_has_parameters_metrics_and_the_report(written, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones ask for a database
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    track("mlflow", written, tmp_path / "out", folder=tmp_path)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.run_name == written.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["tp_size"] == "2"
    assert run.data.metrics["lambada_last_word"] == 0.5
    assert run.data.metrics[f"{PLACE}/first_token_ms"] == 5.0
    files = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert {"report.html", "report.json", "junit.xml", "predictions.jsonl"} <= files


def test_a_tracker_that_fails_is_reported_and_the_report_stands(written, tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where a folder belongs")
    track("tensorboard", written, tmp_path / "out", folder=tmp_path)
    assert "tensorboard did not take the report sample_2024" in caplog.text
