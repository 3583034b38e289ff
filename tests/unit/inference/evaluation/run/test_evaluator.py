"""An evaluation from options to report."""

import json
import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from export_scripts.ft.identity import checkpoint_hash
from export_scripts.ft.layout import manifest_path
from inference.evaluation.options import (
    EvaluationOptions,
    LambadaOptions,
    LatencyOptions,
    TextTaskOptions,
)
from inference.evaluation.record import RunFacts, StageTiming, read_predictions, read_report
from inference.evaluation.report.files import FILE_NAMES, read_run
from inference.evaluation.run.baseline import write_baseline
from inference.evaluation.run.evaluator import evaluate
from inference.evaluation.task import EvaluationError, ImplausibleAnswerError
from tests.ft_folders import write_gpt

LATENCY = LatencyOptions(shapes=["4+2"], concurrencies=[1], requests=3)


@pytest.fixture
def options(passages, tmp_path):
    def make(**changes) -> EvaluationOptions:
        values = {
            "output_dir": tmp_path / "out",
            "data_dir": tmp_path / "data",
            "lambada": LambadaOptions(data_path=passages),
            "latency": LATENCY,
            "concurrency": 4,
        }
        return EvaluationOptions(**{**values, **changes})

    return make


FACTS = RunFacts(name="sample", stages=(StageTiming("convert", "completed", 2.0),))


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_report_is_written_and_returned(options, model, tmp_path):
    report = evaluate(options(), FACTS, model=model)
    assert files(tmp_path / "out") == sorted(FILE_NAMES)
    assert read_report(tmp_path / "out" / "report.json") == report
    assert {metric.name: metric.value for metric in report.metrics}["lambada_last_token"] == 0.5
    assert report.run_id.startswith("sample_")
    assert [point.output_len for point in report.latency] == [2]
    assert report.environment["python"]


def test_the_evaluation_is_the_last_stage_of_the_report(options, model):
    stages = evaluate(options(), FACTS, model=model).run.stages
    assert [stage.name for stage in stages] == ["convert", "evaluate"]
    assert stages[1].seconds > 0


def test_a_report_names_the_family_and_the_hash_of_the_weights_where_they_are_here(
    options, model, tmp_path
):
    folder = write_gpt(tmp_path)
    files = {"model.wte.bin": {"size_bytes": 4, "crc32": "00000001"}}
    manifest_path(folder).write_text(json.dumps({"files": files}))
    found = evaluate(options(weights_dir=folder), FACTS, model=model).run
    assert (found.family, found.model_sha256) == ("gpt", checkpoint_hash(folder))
    assert evaluate(options(weights_dir=tmp_path / "8-gpu"), FACTS, model=model).run.family == ""


def test_options_are_checked_first(options, model):
    with pytest.raises(ValueError, match=r"evaluate\.tasks is empty"):
        evaluate(options(tasks=[], latency=LatencyOptions(enabled=False)), FACTS, model=model)
    assert model.requests == []


def test_failed_requests_leave_only_junit(options, fake_model, model, tmp_path):
    evaluate(options(), FACTS, model=model)
    with pytest.raises(EvaluationError, match="4 of 4 samples could not be evaluated"):
        evaluate(options(), FACTS, model=fake_model(unavailable=True))
    assert files(tmp_path / "out") == ["junit.xml"]


def test_a_server_that_goes_before_samples_are_asked_again_is_named(options, model, tmp_path):
    path = tmp_path / "baseline.json"
    evaluate(options(baseline="update", baseline_path=path), FACTS, model=model)

    def progress(task, done, total):
        model.unavailable = done == total

    gate = {"lambada_perplexity": "no change"}
    asked = options(baseline="compare", baseline_path=path, gate=gate)
    with pytest.raises(EvaluationError, match="refused"):
        evaluate(asked, FACTS, model=model, progress=progress)
    assert files(tmp_path / "out") == ["junit.xml", "lambada.answered.jsonl"]


@pytest.fixture
def _one_asked_again(monkeypatch):
    monkeypatch.setattr("inference.evaluation.run.task_run.SAMPLES_AGAIN", 1)


@pytest.mark.usefixtures("_one_asked_again")
def test_a_run_goes_on_where_the_one_before_it_stopped(options, model, tmp_path):
    whole = evaluate(options(output_dir=tmp_path / "whole"), FACTS, model=model)
    texts = [each.text for each in read_predictions(tmp_path / "whole" / "predictions.jsonl")]
    asked = options(concurrency=1, output_dir=tmp_path / "out")
    model.refuses = {texts[2]}
    with pytest.raises(EvaluationError, match="1 of 4 samples could not be evaluated"):
        evaluate(asked, FACTS, model=model)
    model.refuses = set()
    model.requests.clear()
    report = evaluate(asked, FACTS, model=model)
    assert report.metrics == whole.metrics
    assert report.tasks[0].note == "2 samples were answered in an earlier run that ended"
    assert files(tmp_path / "out") == sorted(FILE_NAMES)


@pytest.mark.usefixtures("_one_asked_again")
def test_an_answer_that_was_not_written_whole_damages_none_after_it(options, model, tmp_path):
    rows = map(json.loads, Path(options().lambada.data_path).read_text().splitlines())
    contexts = [row["text"].rpartition(" ")[0] for row in rows]
    for count in (2, 3):
        model.refuses = set(contexts[count:])
        with pytest.raises(EvaluationError, match="could not be evaluated"):
            evaluate(options(), FACTS, model=model)
        with (tmp_path / "out" / "lambada.answered.jsonl").open("a") as file:
            file.write('{"task": "lam')
    model.refuses = set()
    report = evaluate(options(), FACTS, model=model)
    assert report.tasks[0].note == "2 samples were answered in an earlier run that ended"


@pytest.mark.parametrize("other", ["model", "answers", "options", "damage"])
def test_a_run_does_not_go_on_with_the_answers_of_another(options, model, tmp_path, other):
    last = json.loads(Path(options().lambada.data_path).read_text().splitlines()[3])["text"]
    model.refuses = {last.rpartition(" ")[0]}
    with pytest.raises(EvaluationError, match="1 of 4 samples"):
        evaluate(options(), FACTS, model=model)
    model.refuses, changes = set(), {}
    if other == "model":
        model.log_prob = -0.7
    elif other == "answers":  # which are wrong as those before
        model.continuations["She opened the garden"] = ("x",)
    elif other == "options":
        changes = {"model_name": "another"}
    else:
        path = tmp_path / "out" / "lambada.answered.jsonl"
        path.write_text(path.read_text().replace('"values"', '"place"'))
    report = evaluate(options(**changes), FACTS, model=model)
    assert report.tasks[0].note == ""
    assert [each.count for each in report.metrics] == [4, 4, 4, 4]


@pytest.mark.parametrize(("log_prob", "named"), [(0.5, r"\d.\d"), (math.nan, "nan")])
def test_a_probability_that_cannot_be_ends_the_run_by_name(options, model, log_prob, named):
    model.log_prob = log_prob
    with pytest.raises(ImplausibleAnswerError, match=f"{named}.* log probability"):
        evaluate(options(), FACTS, model=model)


def test_a_gate_that_cannot_be_applied_is_reported_in_junit(options, model, tmp_path, monkeypatch):
    refuse = Mock(side_effect=ValueError("not measured"))
    monkeypatch.setattr("inference.evaluation.run.evaluator.apply_gate", refuse)
    with pytest.raises(ValueError, match="not measured"):
        evaluate(options(), FACTS, model=model)
    assert files(tmp_path / "out") == ["junit.xml", "lambada.answered.jsonl"]


def test_unusable_data_is_reported_in_junit(options, model, passages, tmp_path):
    passages.write_text("{}\n")
    with pytest.raises(ValueError, match="is not a data set of this form"):
        evaluate(options(), FACTS, model=model)
    assert files(tmp_path / "out") == ["junit.xml"]
    assert "is not a data set" in (tmp_path / "out" / "junit.xml").read_text()


def test_unusable_data_leaves_an_earlier_report_alone(options, model, tmp_path, passages):
    evaluate(options(), FACTS, model=model)
    passages.write_text("{}\n")
    with pytest.raises(ValueError, match="no text in field text"):
        evaluate(options(), FACTS, model=model)
    assert files(tmp_path / "out") == sorted(FILE_NAMES)


def test_a_damaged_baseline_stops_before_the_first_request(options, model, tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not a stored run"):
        evaluate(options(baseline="compare", baseline_path=path), FACTS, model=model)
    assert model.requests == []


@pytest.mark.parametrize("limits", [{"paired": "no change"}, {"paired": "no change", "min": 0.1}])
def test_a_baseline_without_a_bounded_metric_stops_before_the_first_request(
    options, model, tmp_path, limits, report, predictions
):
    path = tmp_path / "baseline.json"
    without = replace(report, tasks=(replace(report.tasks[0], metrics=()),))
    write_baseline(path, without, predictions)
    gate = {"lambada_last_word": limits}
    with pytest.raises(ValueError, match="the baseline has no lambada_last_word; it has none"):
        evaluate(options(gate=gate, baseline="compare", baseline_path=path), FACTS, model=model)
    assert model.requests == []


def test_a_past_report_serves_as_baseline(options, model, tmp_path):
    evaluate(options(output_dir=tmp_path / "first"), FACTS, model=model)
    model.continuations.pop("The cook lit the")
    past = tmp_path / "first" / "report.json"
    report = evaluate(options(baseline="compare", baseline_path=past), FACTS, model=model)
    assert report.baseline_source.startswith("run sample_")
    assert report.baseline["lambada_last_word"].value == 0.25
    first = read_predictions(tmp_path / "out" / "predictions.jsonl")[0]
    assert first.baseline["lambada_last_word"] == 1.0
    for page in ("report.md", "changes.md"):
        assert "1 of 4 samples score differently" in (tmp_path / "out" / page).read_text()


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda rows: rows.pop(), 3),
        (lambda rows: rows[0]["values"].clear(), 4),
        (lambda rows: rows[0]["values"].update(lambada_last_word=2.0), 4),
        (lambda rows: rows[0]["values"].update(lambada_last_word=math.nan), 4),
    ],
)
def test_a_past_report_that_is_not_made_of_its_samples_is_refused(
    change, count, options, model, tmp_path
):
    evaluate(options(output_dir=tmp_path / "first"), FACTS, model=model)
    path = tmp_path / "first" / "predictions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=f"does not follow from the {count} samples"):
        read_run(tmp_path / "first" / "report.json")


def test_a_language_has_a_bound_of_its_own(options, model, tmp_path):
    row = {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0}
    data = tmp_path / "xnli.jsonl"
    data.write_text("".join(json.dumps(row | {"language": each}) + "\n" for each in ("de", "fr")))
    asked = options(
        tasks=("xnli",),
        xnli=TextTaskOptions(data_path=data),
        gate={"xnli_accuracy_de": {"min": 0.5}},
        latency=LatencyOptions(enabled=False),
    )
    report = evaluate(asked, FACTS, model=model)
    assert [breach.metric for breach in report.gate.of("breached")] == ["xnli_accuracy_de"]
    with pytest.raises(ValueError, match=r"xnli_accuracy_es .*: xnli_accuracy, xnli_accuracy_de, "):
        evaluate(replace(asked, gate={"xnli_accuracy_es": {"min": 0.5}}), FACTS, model=model)
    assert len(model.requests) == 2  # nothing was asked for a bound that cannot be applied


def test_a_recorded_baseline_trips_the_gate_of_a_worse_run(options, model, tmp_path):
    baseline = {"baseline_path": tmp_path / "baseline.json"}
    gate = {"lambada_last_token": "no change of more than 10 points"}
    assert evaluate(
        options(baseline="update", gate=gate, **baseline), FACTS, model=model
    ).gate.passed
    model.continuations.clear()
    report = evaluate(options(baseline="compare", gate=gate, **baseline), FACTS, model=model)
    (breach,) = report.gate.of("breached")
    assert (breach.value, breach.baseline) == (0.0, 0.5)


def test_a_report_with_its_predictions_is_a_baseline(options, model, tmp_path):
    evaluate(options(), FACTS, model=model)
    path = tmp_path / "earlier" / "report.json"
    (tmp_path / "out").rename(path.parent)
    gate = {"lambada_last_token": {"paired": "no drop of more than 0 points at 95 %"}}
    asked = options(baseline="compare", baseline_path=path, gate=gate)
    assert evaluate(asked, FACTS, model=model).gate.verdicts[0].samples == 4
    path.with_name("predictions.jsonl").unlink()
    with pytest.raises(ValueError, match=r"cannot be a baseline without predictions\.jsonl"):
        evaluate(asked, FACTS, model=model)


def test_a_run_below_its_bounds_does_not_become_the_baseline(options, model, tmp_path):
    path = tmp_path / "baseline.json"
    report = evaluate(
        options(baseline="update", baseline_path=path, gate={"lambada_last_word": {"min": 0.9}}),
        FACTS,
        model=model,
    )
    assert not report.gate.passed
    assert not path.exists()


def test_metrics_json_has_the_harness_s_names(options, model, tmp_path):
    evaluate(options(), FACTS, model=model)
    values = json.loads((tmp_path / "out" / "metrics.json").read_text())["lambada"]
    assert {"acc", "acc_stderr", "last_token_acc", "ppl", "ppl_stderr"} <= set(values)


RISE = "no rise of more than 1 % at 95 %"


def recorded(options, model, tmp_path: Path) -> EvaluationOptions:
    """Record a baseline; return options that compare with it."""
    gate = {"lambada_token_perplexity": RISE, "lambada_last_word": {"min": 0.1}}
    path = tmp_path / "kept" / "baseline.json"
    found = options(gate=gate, baseline="update", baseline_path=path)
    assert len(evaluate(found, FACTS, model=model).gate.verdicts) == 1
    return replace(found, baseline="compare")


def test_a_run_is_compared_with_the_baseline_sample_by_sample(options, model, tmp_path):
    compared = recorded(options, model, tmp_path)
    report = evaluate(compared, FACTS, model=model)
    assert [each.status for each in report.gate.verdicts] == ["insufficient", "held"]
    assert "samples would decide; up to 53 % of all samples" in str(report.gate.verdicts[0])
    predictions = read_predictions(tmp_path / "out" / "predictions.jsonl")
    assert all(each.baseline == each.values and not each.changes for each in predictions)
    assert "samples score differently" not in (tmp_path / "out" / "changes.md").read_text()
    model.continuations = {}  # now it says nothing but "?"
    model.log_prob = -0.7
    report = evaluate(compared, FACTS, model=model)
    assert [(each.metric, each.status) for each in report.gate.verdicts] == [
        ("lambada_token_perplexity", "breached"),
        ("lambada_last_word", "breached"),
    ]
    changes = (tmp_path / "out" / "changes.md").read_text()
    assert "4 of 4 samples score differently from the baseline, the most changed first." in changes
    assert "last word 1 to 0" in changes
    suite = ET.parse(tmp_path / "out" / "junit.xml").getroot().find("testsuite[@name='gate']")
    assert suite is not None
    assert [case.get("name") for case in suite] == [
        f"lambada_token_perplexity: {RISE}",
        "lambada_last_word: min 0.1",
    ]
    assert suite.get("failures") == "2"
    advisory = evaluate(replace(compared, advisory=["lambada"]), FACTS, model=model)
    assert (advisory.gate.passed, len(advisory.gate.of("breached"))) == (True, 2)
    suite = ET.parse(tmp_path / "out" / "junit.xml").getroot().find("testsuite[@name='gate']")
    assert suite is not None
    assert (suite.get("failures"), suite.get("skipped")) == ("0", "2")


def test_a_run_says_how_far_the_load_moves_it_and_the_gate_allows_for_that(
    options, model, tmp_path
):
    compared = recorded(options, model, tmp_path)
    report = evaluate(compared, FACTS, model=model)
    assert report.tasks[0].note == "4 samples asked again, one at a time, gave the same digits"
    exact = model._log_prob
    asked: Counter[str] = Counter()

    def loaded(text: str) -> float:  # the second answer is 0.5 % of a nat a token better
        asked[text] += 1
        return exact(text) * (0.99 if asked[text] > 1 else 1.0)

    model._log_prob = loaded
    report = evaluate(compared, FACTS, model=model)
    assert "gave other digits for 4, which moves" in report.tasks[0].note
    assert "lambada_token_perplexity by 0.501 %" in report.tasks[0].note
    (verdict, _) = report.gate.verdicts
    assert (verdict.status, verdict.note) == ("insufficient", "the load moves it by 0.501 %")
