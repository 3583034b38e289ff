"""`--multirun`: every combination is checked first, runs in its own folder and is compared."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launcher_scripts.console import Console
from launcher_scripts.main import main
from launcher_scripts.sweep import Combination, Outcome, combinations, comparison, run_sweep
from tests.unit.launcher_scripts.test_run import make_run
from tests.unit.launcher_scripts.toy_stages import WriteStage, settings

SAMPLE = ("--multirun", "export=gpt3/sample")
TP = "export.model.tensor_model_parallel_size"


def test_values_are_combined_in_the_order_of_the_command_line() -> None:
    found, problems = combinations(["a=1,2", "c=x", "b=[3,4],5", "d=choice(7)"])
    assert problems == []
    assert [each.label for each in found] == [
        "a=1,b=[3,4],d=7", "a=1,b=5,d=7", "a=2,b=[3,4],d=7", "a=2,b=5,d=7",
    ]  # fmt: skip
    assert found[0].overrides == ("c=x", "a=1", "b=[3,4]", "d=7")


@pytest.mark.parametrize("values", ["interval(1,2)", "glob(*)"])
def test_values_that_are_not_listed_are_refused(values: str) -> None:
    _, (problem,) = combinations([f"a={values}"])
    assert "a=1,2,4" in problem


def test_sizes_are_swept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SAMPLE, f"{TP}=1,4", "stages=[convert,export]", f"base_results_dir={tmp_path}"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "[2/2] tensor_model_parallel_size=4" in shown
    header, _, one, four, *_ = shown[shown.index("tensor_model_parallel_size  state") :].split("\n")
    assert header.split()[:3] == ["tensor_model_parallel_size", "state", "seconds"]
    assert (one.split()[:2], four.split()[:2]) == (["1", "completed"], ["4", "completed"])
    assert {path.name for path in tmp_path.rglob("*-gpu")} == {"1-gpu", "4-gpu"}
    saved = json.loads((tmp_path / "sweep.json").read_text())["combinations"]
    assert [each["values"][TP] for each in saved] == ["1", "4"]
    assert all(each["exit_status"] == 0 for each in saved)
    assert main(["action=status", f"base_results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("completed") == 4  # two stages of either


def test_combinations_that_would_share_a_folder_get_one_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SAMPLE, "export.triton_deployment.max_batch_size=1,2", "stages=[export]"]
    assert main([*words, f"base_results_dir={tmp_path}/today's", "dry_run=true"]) == 0
    folders = {path.parents[1].name for path in tmp_path.rglob("export/*_submission.sh")}
    assert folders == {"max_batch_size-1", "max_batch_size-2"}


def test_values_with_one_name_get_a_folder_each_and_equal_ones_run_once(tmp_path: Path) -> None:
    words = [*SAMPLE, "convert.allow=[a+b],[a-b],[a+b]", "stages=[convert]", "dry_run=true"]
    assert main([*words, f"base_results_dir={tmp_path}"]) == 0
    folders = {path.parents[1].name for path in tmp_path.rglob("convert/*_submission.sh")}
    assert folders == {"allow-a-b--1", "allow-a-b--2"}


def test_nothing_starts_when_one_combination_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SAMPLE, f"{TP}=1,3,5", "stages=[convert]", f"base_results_dir={tmp_path}/r"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert "tensor_model_parallel_size=3: " in shown
    assert "tensor_model_parallel_size=5: " in shown
    assert not (tmp_path / "r").exists()


def test_problem_of_every_combination_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SAMPLE, f"{TP}=1,2,3", "deploy.engin=x", f"base_results_dir={tmp_path}/r"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.count("unknown key deploy.engin") == 1
    assert "tensor_model_parallel_size=3: " in shown  # which does not divide the heads


def test_one_failure_does_not_stop_the_others_and_is_the_exit_status(tmp_path: Path) -> None:
    outcomes = []
    for each, fails in (("1", "error"), ("2", "")):
        run, _ = make_run(WriteStage(settings(tmp_path / each, "write"), fails=fails))
        outcomes.append(Outcome(Combination({"a.size": each}, ()), run))
    console = Console(io.StringIO())
    assert run_sweep(outcomes, wait=False, console=console, folder=tmp_path) == 1
    results = [each.result() for each in outcomes]
    header, _, first, second = comparison(results, console).strip().splitlines()
    assert header.split() == ["size", "state", "seconds", "lines", "results"]
    assert first.split()[:2] == ["1", "failed"]
    assert second.split()[:2] == ["2", "completed"]
    assert second.split()[3] == "1"  # the figure that the stage found
