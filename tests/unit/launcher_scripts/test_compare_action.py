"""action=compare: two evaluations side by side."""

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
    """Return a results folder with two evaluations, `first` and `second`."""
    model = partly_right_model()
    for name in ("first", "second"):
        options = EvaluationOptions(
            output_dir=str(tmp_path / name),
            data_dir=tmp_path,
            lambada=LambadaOptions(data_path=str(write_passages(tmp_path / "passages.jsonl"))),
            latency=LatencyOptions(enabled=False),
        )
        evaluate(options, RunFacts(name=name), model=model)
        model.continuations.clear()
    return tmp_path


def compare(results: Path, *words: str) -> int:
    return main(["action=compare", "export=gpt3/sample", f"base_results_dir={results}", *words])


def differences(text: str) -> list[list[str]]:
    """Return value and difference of each metric of the second run, under its name."""
    return [[*words[1:3], *words[8:10]] for words in map(str.split, text.splitlines()) if words]


@pytest.mark.parametrize("in_a_list", [True, False])
def test_two_runs_are_compared(results: Path, in_a_list: bool, capsys) -> None:
    runs = [str(results / "first"), str(results / "second" / "report.json")]
    words = [f"runs=[{','.join(runs)}]"] if in_a_list else runs
    assert compare(results, *words) == 0
    reported = capsys.readouterr().out
    assert ["lambada_last_word", "0.00%", "-25.00", "pt"] in differences(reported)
    assert "2 samples changed between right and wrong." in reported
    assert (results / "comparison.html").is_file()


def test_two_runs_are_needed(results: Path, capsys) -> None:
    assert compare(results, str(results / "first")) == 2
    assert "action=compare needs two runs" in capsys.readouterr().out
