"""A baseline as it is written, read, and applied to later runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluation.options import Bound, EvaluationOptions, LambadaOptions
from inference.evaluation.run.baseline import Baseline, read_baseline, write_baseline
from inference.evaluation.run.preparation import prepare_task
from inference.evaluation.run.task_run import TaskRun, run_task
from inference.evaluation.tasks.lambada import Lambada


def run(passages: Path, model, **changes) -> TaskRun:
    options = EvaluationOptions(data_dir=Path(), lambada=LambadaOptions(passages), **changes)
    task = Lambada(options)
    return run_task(prepare_task(task), model, concurrency=2)


@pytest.mark.parametrize(
    "content",
    ["nothing", "[]", "{}", '{"schema_version": 1, "source": "x", "metrics": {"m": 1}}'],
)
def test_invalid_baselines_are_refused(tmp_path, content):
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"baseline\.json .*record it again"):
        read_baseline(path)


def stored(report, found: TaskRun | None, tmp_path: Path) -> Baseline:
    path = tmp_path / "kept" / "baseline.json"
    if found is None:
        return write_baseline(path, report, ())
    (task,) = report.tasks
    own = replace(task, metrics=found.report.metrics, dataset=found.report.dataset)
    write_baseline(path, replace(report, tasks=(own,)), found.predictions)
    return read_baseline(path)


def test_a_baseline_reads_back(report, passages, model, tmp_path):
    found = run(passages, model)
    baseline = stored(report, found, tmp_path)
    assert baseline.metrics == {metric.name: metric for metric in found.report.metrics}
    assert baseline.source == f"run {report.run_id} of {report.started_at}"
    baseline.check("lambada", found.report.version, found.report.dataset, found.prepared.samples)
    for each in found.predictions:
        assert baseline.values(each) == each.values


def test_figures_of_other_data_that_no_sample_makes_are_refused(report, tmp_path):
    limited = replace(report.tasks[0].dataset, limit=10, seed=1)
    with pytest.raises(ValueError, match="was measured on other samples of lambada"):
        stored(report, None, tmp_path).check("lambada", 1, limited, ())


@pytest.mark.parametrize("value", [float("nan"), 2.0])
def test_a_changed_score_is_refused(report, passages, model, tmp_path, value):
    found = run(passages, model)
    first, *others = found.predictions
    changed = replace(first, values={**first.values, "lambada_last_word": value})
    with pytest.raises(ValueError, match=r"baseline\.json: lambada_last_word of 4 samples does"):
        stored(report, replace(found, predictions=(changed, *others)), tmp_path)


def test_samples_are_known_by_their_content_not_by_their_place(report, passages, model, tmp_path):
    found = run(passages, model)
    baseline = stored(report, found, tmp_path)
    lines = passages.read_text().splitlines(keepends=True)
    passages.write_text("".join(reversed(lines)))
    again = run(passages, model)
    assert again.report.dataset.sha256 != found.report.dataset.sha256
    baseline.check("lambada", 1, again.report.dataset, again.prepared.samples)
    assert [baseline.values(each) for each in again.predictions] == [
        each.values for each in reversed(found.predictions)
    ]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda lines: lines[1:], "1 of its 4 are missing or changed in this run"),
        (lambda lines: [*lines, lines[0]], "0 of its 4 are missing .* 1 of this run's 5 are not"),
        (
            lambda lines: [lines[0].replace("lamp", "fire"), *lines[1:]],
            r"1 of its 4 are missing or changed .* 1 of this run's 4 are not in it \(rows 0\)",
        ),
    ],
)
def test_samples_that_are_missing_or_changed_are_an_error(
    report, passages, model, tmp_path, change, reported
):
    baseline = stored(report, run(passages, model), tmp_path)
    passages.write_text("".join(change(passages.read_text().splitlines(keepends=True))))
    again = run(passages, model)
    with pytest.raises(ValueError, match=reported):
        baseline.check("lambada", 1, again.report.dataset, again.prepared.samples)


def test_scores_by_other_rules_are_an_error(report, passages, model, tmp_path):
    found = run(passages, model)
    with pytest.raises(ValueError, match="was scored by version 1 of lambada, this run by 2"):
        stored(report, found, tmp_path).check(
            "lambada", 2, found.report.dataset, found.prepared.samples
        )


def test_a_sentence_about_a_metric_of_all_answers_together_is_refused(
    report, make_metric, tmp_path
):
    bleu = make_metric("translation_bleu", 30.0, unit="BLEU", sample_value="translation_sentence")
    task = replace(report.tasks[0], metrics=(bleu,))
    baseline = stored(replace(report, tasks=(task,)), None, tmp_path)
    bound = Bound(paired="no drop of more than 1 at 95 %")
    (problem,) = baseline.problems({"translation_bleu": bound})
    assert "translation_bleu is not a mean over samples" in problem
    assert baseline.problems({"translation_bleu": Bound(paired="no change")}) == []
