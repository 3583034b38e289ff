"""action=compare: two evaluations of the run store."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions, LatencyOptions
from inference.evaluation.record import RunFacts
from inference.evaluation.run.evaluator import evaluate
from launcher_scripts.main import main
from tests.fake_model import partly_right_model, write_passages


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a results folder whose run store has two evaluations."""
    options = EvaluationOptions(
        output_dir=str(tmp_path / "out"),
        data_dir=tmp_path,
        lambada=LambadaOptions(data_path=str(write_passages(tmp_path / "passages.jsonl"))),
        latency=LatencyOptions(enabled=False),
        history_dir=str(tmp_path / "evaluations"),
    )
    model = partly_right_model()
    evaluate(options, RunFacts(name="first"), model=model)
    model.continuations.clear()
    evaluate(options, RunFacts(name="second"), model=model)
    return tmp_path


def compare(results: Path, *words: str) -> int:
    return main(["action=compare", "export=gpt3/sample", f"base_results_dir={results}", *words])


def differences(text: str) -> list[list[str]]:
    """Return value and difference of each metric of the second run, under its name."""
    return [[*words[1:3], *words[8:10]] for words in map(str.split, text.splitlines()) if words]


def test_the_last_two_runs_are_compared(results: Path, capsys) -> None:
    assert compare(results) == 0
    reported = capsys.readouterr().out
    assert ["lambada_last_word", "0.00%", "-25.00", "pt"] in differences(reported)
    assert "2 samples changed between right and wrong." in reported
    assert (results / "evaluations" / "comparison.html").is_file()


@pytest.mark.parametrize("words", [("second", "first"), ("runs=[second,first]",)])
def test_runs_can_be_named(results: Path, words, capsys) -> None:
    assert compare(results, *words) == 0
    reported = differences(capsys.readouterr().out)
    assert ["lambada_last_word", "25.00%", "+25.00", "pt"] in reported


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("latest",), "action=compare needs two runs"),
        (("evaluate.history_dir=null",), "name a report.json"),
    ],
)
def test_two_runs_and_what_names_them_are_needed(results: Path, words, reported, capsys) -> None:
    assert compare(results, *words) == 2
    captured = capsys.readouterr()
    assert reported in captured.out + captured.err


def test_two_reports_are_compared_where_there_is_no_run_store(results: Path, capsys) -> None:
    paths = [str(each) for each in sorted((results / "evaluations").glob("*/report.json"))]
    elsewhere = results / "elsewhere"
    assert compare(elsewhere, *paths) == 0
    assert (elsewhere / "evaluations" / "comparison.html").is_file()
    assert compare(elsewhere, *paths, "evaluate.history_dir=null") == 0
    assert "lambada_last_word" in capsys.readouterr().out
