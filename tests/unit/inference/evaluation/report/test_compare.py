"""The comparison of two runs."""

from dataclasses import replace
from math import exp

import pytest

from inference.compare import main
from inference.evaluation.record import LatencyPoint
from inference.evaluation.report.compare import (
    ComparedRun,
    SideBySide,
    compare_runs,
)
from inference.evaluation.report.document import terminal_text
from inference.evaluation.report.files import write_report
from inference.evaluation.task import Prediction
from tests.conftest import present


@pytest.fixture
def store(report, predictions, tmp_path):
    """Return a folder with the reports of two runs, `run_a` and `run_b`."""
    for run_id in ("run_a", "run_b"):
        (tmp_path / run_id).mkdir()
        write_report(tmp_path / run_id, replace(report, run_id=run_id), predictions)
    return tmp_path


def text_of(report, found: ComparedRun) -> str:
    return terminal_text(SideBySide(report.run_id, report, [found]).text())


def changed(predictions):
    """Return the predictions with the second one right."""
    values = {"lambada_last_word": 1.0}
    return (predictions[0], replace(predictions[1], values=values, answer=" <gate>"))


def test_changed_samples_are_listed(report, predictions, make_metric):
    metric = make_metric(value=1.0, scale="mean")
    better = replace(report, tasks=(replace(report.tasks[0], metrics=(metric,)),))
    found = compare_runs((report, predictions), (better, changed(predictions)))
    metric = found.comparisons["lambada_last_word"]
    assert (metric.difference, metric.same, metric.count) == (0.5, 1, 2)
    ((_, sample, words),) = found.changed
    assert (sample.index, words) == (1, {"lambada_last_word": "now right"})


def test_other_data_is_not_paired_and_said(report, predictions):
    task = replace(report.tasks[0], dataset=replace(report.tasks[0].dataset, sha256="0" * 64))
    second = replace(report, tasks=(task,)), changed(predictions)
    found = compare_runs((report, predictions), second)
    assert not list(found.changed)
    assert found.comparisons["lambada_last_word"].count == 0
    assert "the runs used other data" in text_of(report, found)


def test_a_metric_that_was_measured_in_two_ways_is_noted(report, make_metric):
    by_text = replace(report.tasks[0], metrics=(make_metric(method="by the text alone"),))
    served = replace(report.run, engine="vllm")
    second = replace(report, tasks=(by_text,), run=served)
    reported = text_of(report, compare_runs((report, ()), (second, ())))
    assert "measured in two ways: counted (first run), by the text alone (second run)." in reported
    assert "(vllm, TP 2 x PP 1, fp32)" in reported


def test_runs_without_a_common_metric_are_refused(report):
    with pytest.raises(ValueError, match="have no metric in common"):
        compare_runs((report, ()), (replace(report, tasks=()), ()))


def test_the_comparison_is_reported_and_drawn(report, predictions):
    point = LatencyPoint(1, 32, 8, 1, 4, 32, report.tasks[0].requests.latency, 100.0, 9.0)
    slower = replace(point, tokens_per_s=80.0)
    first, second = (replace(report, latency=(each,)) for each in (point, slower))
    found = compare_runs((first, predictions), (second, changed(predictions)))
    reported = text_of(first, found)
    assert "lambada_last_word" in reported
    assert "1 sample changed between right and wrong." in reported
    assert "-20.0%" in reported
    page = SideBySide(report.run_id, report, [found]).page().html()
    assert "now right" in page
    assert r"\&lt;/script\&gt;\&lt;b\&gt;\&amp; the" in page


def asked(texts, rights, *, task="lambada", group=""):
    """Return the predictions of a run: the samples of `texts`, right where `rights` says so."""
    return [
        Prediction(
            task, i, text, "lamp", str(right), {f"{task}_x": right}, 0.01, id=text, group=group
        )
        for i, (text, right) in enumerate(zip(texts, rights, strict=True))
    ]


def test_samples_are_matched_by_their_content(report, make_metric):
    metric = make_metric("lambada_x", scale="mean")
    run = replace(report, tasks=(replace(report.tasks[0], metrics=(metric,)),))
    other = replace(run.tasks[0], dataset=replace(run.tasks[0].dataset, sha256="0" * 64))
    first = asked("abcdefghijklmno", [1.0] * 15)
    second = asked("onmlkjihgfedcbx", [0.0] * 4 + [1.0] * 11)
    found = compare_runs((run, first), (replace(run, tasks=(other,)), second))
    (task,) = found.tasks
    assert (len(task.pairs), len(task.olds), len(task.news), task.same_answers) == (14, 15, 15, 10)
    assert [each.text for _, each, _ in found.changed] == [*"onml"]
    assert {words["lambada_x"] for *_, words in found.changed} == {"now wrong"}
    metric = found.comparisons["lambada_x"]
    assert metric.difference == pytest.approx(-4 / 14)
    assert present(metric.low) < metric.difference < present(metric.high) < 0.1
    assert metric.p_value == pytest.approx(2 * 0.5**4)
    reported = text_of(run, found)
    assert reported.count("last word now wrong") == 0
    assert reported.count("x now wrong") == 4


def test_each_task_and_each_group_is_compared_with_itself(report, make_metric):
    parts = (
        make_metric("lambada_x", scale="mean"),
        make_metric("lambada_x_de", scale="mean", sample_value="lambada_x", group="de"),
    )
    boolq = make_metric("boolq_x", scale="mean")
    tasks = (
        replace(report.tasks[0], metrics=parts),
        replace(report.tasks[0], name="boolq", metrics=(boolq,)),
    )
    run = replace(report, tasks=tasks)
    german = asked("ab", [1.0, 1.0], group="de")
    first = [*german, *asked("cd", [1.0, 1.0]), *asked("ef", [1.0, 0.0], task="boolq")]
    second = [*german, *asked("cd", [0.0, 0.0]), *asked("ef", [1.0, 1.0], task="boolq")]
    found = compare_runs((run, first), (run, second)).comparisons
    whole, group, other = found.values()
    assert (whole.difference, group.difference, other.difference) == (-0.5, 0.0, 0.5)


def test_the_interval_of_a_perplexity_is_in_its_unit(report, make_metric):
    metric = make_metric("lambada_x", 9.0, scale="exp", unit="perplexity", higher_is_better=False)
    run = replace(report, tasks=(replace(report.tasks[0], metrics=(metric,)),))
    texts = "abcdefghij"
    first = asked(texts, [-2.0 - 0.01 * i for i in range(10)])
    second = asked(texts, [-2.1 - 0.011 * i for i in range(10)])
    found = compare_runs((run, first), (run, second)).comparisons["lambada_x"]
    assert found.difference == pytest.approx(exp(2.1 + 0.0495) - exp(2.045))
    assert 0 < present(found.low) < found.difference < present(found.high)
    assert present(found.high) < 1.1 * found.difference
    assert found.same == 0
    assert found.largest_change == pytest.approx(0.1 + 0.009)


def test_the_command_prints_and_writes_a_page(store, tmp_path, capsys):
    page = tmp_path / "comparison.html"
    runs = [str(store / "run_a"), str(store / "run_b" / "report.json")]
    assert main([*runs, "--output", str(page)]) == 0
    assert "run_a (TP 2 x PP 1, fp32)" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_answers_a_report_that_is_not_there(store, capsys):
    assert main([str(store / "run_a"), str(store / "nothing")]) == 2
    assert f"there is no report at {store / 'nothing'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [b"{}", b"\xff", b"[" * 100_000, b"5"], ids=["empty", "bytes", "nested", "number"]
)
def test_a_damaged_report_is_named(store, capsys, text):
    (store / "run_b" / "report.json").write_bytes(text)
    assert main([str(store / "run_a"), str(store / "run_b")]) == 2
    assert "run_b/report.json" in capsys.readouterr().err
