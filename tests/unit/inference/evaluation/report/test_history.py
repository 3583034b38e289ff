"""The run store and the comparison of two runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from inference.compare import main
from inference.evaluation.options import EvaluationOptions, LambadaOptions, LatencyOptions
from inference.evaluation.record import LatencyPoint, RunFacts
from inference.evaluation.report.compare import (
    ComparedRun,
    SideBySide,
    compare_runs,
)
from inference.evaluation.report.document import terminal_text
from inference.evaluation.report.files import write_report
from inference.evaluation.report.history import (
    append_run,
    comparable_history,
    find_run,
    history_point,
    read_history,
)
from inference.evaluation.report.pages import report_page
from inference.evaluation.run.evaluator import evaluate
from inference.evaluation.task import Prediction
from tests.conftest import present


@pytest.fixture
def store(report, predictions, tmp_path):
    """Return a store of three runs, `run_a`, `run_b` and `other_c`."""
    history_dir = tmp_path / "evaluations"
    for run_id in ("run_a", "run_b", "other_c"):
        made = replace(report, run_id=run_id)
        output_dir = tmp_path / run_id
        output_dir.mkdir()
        write_report(output_dir, made, predictions)
        append_run(history_dir, made, output_dir)
    return history_dir


def test_a_run_is_kept_whole(store):
    assert sorted(each.name for each in store.iterdir()) == [
        "other_c",
        "run_a",
        "run_b",
    ]
    assert sorted(each.name for each in (store / "run_a").iterdir()) == [
        "predictions.jsonl",
        "report.json",
    ]
    assert [point.run_id for point in read_history(store)] == ["run_a", "run_b", "other_c"]


def test_a_store_that_is_not_there_is_empty(tmp_path):
    assert read_history(tmp_path) == []


@pytest.mark.parametrize(
    "text", [b"{}", b"\xff", b"[" * 100_000, b"5"], ids=["empty", "bytes", "nested", "number"]
)
def test_a_damaged_report_of_the_store_is_named(store, text):
    (store / "run_b" / "report.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"run_b/report.json"):
        read_history(store)


def test_a_run_that_is_being_added_is_not_seen(store):
    (store / "run_b").rename(store / ".partial-x")
    assert [point.run_id for point in read_history(store)] == ["run_a", "other_c"]


@pytest.mark.parametrize(
    ("run", "found"),
    [("run_a", "run_a"), ("oth", "other_c"), ("latest", "other_c"), ("latest~2", "run_a")],
)
def test_runs_are_found_by_id_beginning_and_age(store, run, found):
    assert find_run(run, history_dir=store) == store / found / "report.json"


def test_a_run_is_found_by_its_folder(store):
    assert find_run(str(store / "run_b"), history_dir=None) == store / "run_b" / "report.json"


@pytest.mark.parametrize(
    ("run", "reported"),
    [
        ("run", "several runs begin with 'run'"),
        ("x", "no run 'x'"),
        ("latest~9", "no run 'latest~9'"),
    ],
)
def test_an_ambiguous_run_is_answered_with_the_known_ones(store, run, reported):
    with pytest.raises(ValueError, match=reported) as caught:
        find_run(run, history_dir=store)
    assert "run_a" in str(caught.value)


def test_only_runs_of_the_same_name_over_the_same_samples_are_drawn(report):
    limited = replace(report.tasks[0], dataset=replace(report.tasks[0].dataset, limit=5))
    points = [
        history_point(replace(report, run_id="same")),
        history_point(replace(report, run_id="name", run=RunFacts(name="another"))),
        history_point(replace(report, run_id="limit", tasks=(limited,))),
    ]
    shown = comparable_history(points, report)
    assert [point.run_id for point in shown] == ["same", report.run_id]


def test_the_page_draws_the_history_from_the_second_run_on(report, predictions):
    alone = replace(report, history=comparable_history([], report))
    earlier = history_point(replace(report, run_id="earlier"))
    assert "## History" not in report_page(alone, predictions).text
    again = report_page(replace(report, history=(earlier, *alone.history)), predictions)
    assert "## History\n\nThe last 2 runs" in again.text
    drawn = again.data["report"]["history"]
    assert [each["run_id"] for each in drawn] == ["earlier", report.run_id]


def test_an_evaluation_adds_itself(passages, model, tmp_path):
    options = EvaluationOptions(
        output_dir=tmp_path / "out",
        data_dir=tmp_path,
        lambada=LambadaOptions(data_path=passages),
        latency=LatencyOptions(enabled=False),
        history_dir=tmp_path / "evaluations",
    )
    first = evaluate(options, RunFacts(name="sample"), model=model)
    second = evaluate(options, RunFacts(name="sample"), model=model)
    assert [point.run_id for point in second.history] == [first.run_id, second.run_id]
    assert len(read_history(tmp_path / "evaluations")) == 2


def text_of(report, found: ComparedRun) -> str:
    return terminal_text(SideBySide(report.run_id, report, [found]).text())


def changed(predictions):
    """Return the predictions with the second one right."""
    values = {"lambada_last_word": 1.0}
    return (predictions[0], replace(predictions[1], values=values, answer=" <gate>"))


def test_changed_samples_are_listed(report, predictions, make_metric):
    better = replace(report, tasks=(replace(report.tasks[0], metrics=(make_metric(value=1.0),)),))
    found = compare_runs((report, predictions), (better, changed(predictions)))
    metric = found.comparisons["lambada_last_word"]
    assert (metric.difference, metric.agreeing, metric.disagreeing) == (0.5, 1, 1)
    ((_, sample, words),) = found.changed
    assert (sample.index, words) == (1, {"lambada_last_word": "now right"})


def test_other_data_is_not_paired_and_said(report, predictions):
    task = replace(report.tasks[0], dataset=replace(report.tasks[0].dataset, sha256="0" * 64))
    second = replace(report, tasks=(task,)), changed(predictions)
    found = compare_runs((report, predictions), second)
    assert found.changed == ()
    assert found.comparisons["lambada_last_word"].agreeing is None
    assert "the runs used other data" in text_of(report, found)


def test_a_metric_that_was_measured_in_two_ways_is_noted(report, make_metric):
    by_text = replace(report.tasks[0], metrics=(make_metric(method="by the text alone"),))
    served = replace(report.run, engine="vllm")
    second = replace(report, tasks=(by_text,), run=served)
    reported = text_of(report, compare_runs((report, ()), (second, ())))
    assert "measured in two ways: first, counted; second, by the text alone." in reported
    assert "(vllm, TP 2 x PP 1, fp32)" in reported


def test_runs_without_a_common_metric_are_refused(report):
    with pytest.raises(ValueError, match="have no metric in common"):
        compare_runs((report, ()), (replace(report, tasks=()), ()))


def test_the_comparison_is_reported_and_drawn(report, predictions):
    point = LatencyPoint(1, 32, 8, 1, 4, 32, report.tasks[0].requests.latency, 100.0, 9.0)
    slower = replace(point, tokens_per_s=80.0)
    found = compare_runs(
        (replace(report, latency=(point,)), predictions),
        (replace(report, latency=(slower,)), changed(predictions)),
    )
    reported = text_of(report, found)
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
    first, second = found.samples
    assert second[:6] == ("lambada", run.run_id, "14", "1", "1", "10")
    assert first[:6] == ("lambada", "", "", "", "", "")
    assert [each.text for _, each, _ in found.changed] == [*"onml"]
    assert {words["lambada_x"] for *_, words in found.changed} == {"now wrong"}
    metric = found.comparisons["lambada_x"]
    assert metric.difference == pytest.approx(-4 / 14)
    assert present(metric.low) < metric.difference < present(metric.high) < 0.05
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
    assert found.agreeing is None


def test_the_command_prints_and_writes_a_page(store, tmp_path, capsys):
    page = tmp_path / "comparison.html"
    command = ["run_a", "latest", "--history-dir", str(store), "--output", str(page)]
    assert main(command) == 0
    assert "run_a (TP 2 x PP 1, fp32)" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_answers_an_unknown_run(store, capsys):
    assert main(["nothing", "latest", "--history-dir", str(store)]) == 2
    assert "there is no run 'nothing'" in capsys.readouterr().err
