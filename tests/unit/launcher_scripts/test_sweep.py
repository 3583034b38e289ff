"""`--multirun`: every combination is checked first, and runs in a folder of its own."""

import pytest

from launcher_scripts.main import main
from launcher_scripts.sweep import combinations

SAMPLE = ("--multirun", "export=gpt3/sample")
TP = "export.model.tensor_model_parallel_size"


def test_values_are_combined_in_the_order_of_the_command_line():
    found, problems = combinations(["a=1,2", "c=x", "b=[3,4],5", "d=choice(7)"])
    assert problems == []
    assert list(found) == ["a=1,b=[3,4],d=7", "a=1,b=5,d=7", "a=2,b=[3,4],d=7", "a=2,b=5,d=7"]
    assert found["a=1,b=[3,4],d=7"] == ["c=x", "a=1", "b=[3,4]", "d=7"]


def test_values_may_have_dots():
    found, _ = combinations(["a.b=0.5,1.5", "c.path=/x.nemo,/y.nemo"])
    assert list(found) == [
        "b=0.5,path=/x.nemo", "b=0.5,path=/y.nemo", "b=1.5,path=/x.nemo", "b=1.5,path=/y.nemo",
    ]  # fmt: skip


@pytest.mark.parametrize("values", ["interval(1,2)", "glob(*)"])
def test_values_that_are_not_listed_are_refused(values):
    _, (problem,) = combinations([f"a={values}"])
    assert "a=1,2,4" in problem


def test_sizes_are_swept(tmp_path, capsys):
    words = [*SAMPLE, f"{TP}=1,4", "stages=[convert]", f"base_results_dir={tmp_path}"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "[2/2] tensor_model_parallel_size=4" in shown
    assert {path.name for path in tmp_path.rglob("*-gpu")} == {"1-gpu", "4-gpu"}
    assert main(["action=status", f"base_results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("completed") == 2


def test_combinations_that_would_share_a_folder_get_one_each(tmp_path):
    """Also those whose values differ in characters that the name of a folder has not."""
    words = [*SAMPLE, "convert.allow=[a+b],[a-b],[a+b]", "stages=[convert]", "dry_run=true"]
    assert main([*words, f"base_results_dir={tmp_path}/today's"]) == 0
    folders = {path.parents[1].name for path in tmp_path.rglob("convert/*_submission.sh")}
    assert folders == {"1-allow-a-b-", "2-allow-a-b-"}


def test_problem_of_every_combination_is_reported_once(tmp_path, capsys):
    words = [*SAMPLE, f"{TP}=1,2,3", "deploy.engin=x", f"base_results_dir={tmp_path}/r"]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.count("unknown key deploy.engin") == 1
    assert not (tmp_path / "r").exists()


def test_a_sweep_runs_and_does_nothing_else(tmp_path, capsys):
    words = [*SAMPLE, f"{TP}=1,2", "action=watch", f"base_results_dir={tmp_path}/r"]
    assert main(words) == 2
    assert "--multirun with action=watch: a sweep works only" in capsys.readouterr().err
