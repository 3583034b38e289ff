"""action=upgrade: rows are checked, composed with folders of their own, and judged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions, LatencyOptions
from inference.evaluation.record import RunFacts
from inference.evaluation.run.evaluator import evaluate
from launcher_scripts import upgrade
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.console import Console
from launcher_scripts.main import main
from launcher_scripts.upgrade import command_lines_of_rows, problems_of_upgrade, run_and_decide
from tests.fake_model import partly_right_model, write_passages

SAMPLE = ["action=upgrade", "export=gpt3/sample", "stages=[evaluate]"]
TP = "export.model.tensor_model_parallel_size"


def config_of(*words: str) -> Any:
    composition = compose_config([*SAMPLE, *words])
    assert not composition.problems
    return composition.config


@pytest.mark.parametrize(
    ("rows", "reported"),
    [
        ("{}", "upgrade.rows has 0"),
        ("{now:{},next:{evaluate.limit:5}}", "evaluate.limit is the same for all rows"),
        ("{now:{},next:{evaluate.lambada.data_path:/x}}", "data_path is the same for all rows"),
        ("{now:{},next:{evaluate:{limit:5}}}", "evaluate.limit is the same for all rows"),
        ("{now:{},next:{stages:[deploy]}}", "stages is the same for all rows"),
        ("{now:{},next:{cluster:bcm}}", "cluster is the same for all rows"),
        ("{now:{},next:5}", "upgrade.rows.next=5 is not a mapping"),
        ("{now:{},a/b:{}}", "upgrade.rows.a/b: "),
        ("{now:{},..:{}}", "upgrade.rows...: "),
        ("{now:{},junit.xml:{}}", "upgrade.rows.junit.xml: "),
        ("{now:{},next:{dry_run:false}}", "dry_run is the same for all rows"),
        ("{now:{},next:{data_dir:/x}}", "data_dir is the same for all rows"),
        ("{now:{},next:{export.accuracy.enabled:true}}", "enabled is the same for all rows"),
    ],
)
def test_rows_that_would_not_be_comparable_are_refused(rows, reported):
    (problem,) = problems_of_upgrade(config_of(f"++upgrade.rows={rows}"), ())
    assert reported in problem


@pytest.mark.parametrize(
    ("keys", "is_kept"),
    [
        ("{}", False),
        ("{deploy.openai.enabled:true}", True),
        ("{deploy:{openai:{enabled:true}}}", True),
        ("{deploy.engine:vllm}", False),
    ],
)
def test_keys_of_openais_protocol_are_for_rows_that_speak_it(keys, is_kept):
    common = "deploy.openai.port=9001"
    config = config_of(f"++upgrade.rows={{now:{keys}}}")
    found = command_lines_of_rows(config, ["action=upgrade", common, "deploy.drain_s=3"])
    assert (common in found["now"]) is is_kept
    assert "deploy.drain_s=3" in found["now"]


def test_wrong_rows_and_bounds_are_refused_at_once_without_waiting(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(upgrade, "wait_for_rows", None)
    words = ["upgrade.rows={now:{},next:{deploy.engin:vllm}}", "wait=true"]
    for more in ([], ["upgrade.gate.lambada_last_word=no harm"]):
        assert main([*SAMPLE, *words, *more, f"base_results_dir={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert "next: deploy.engin='vllm': unknown key deploy.engin " in said
    assert "upgrade.gate.lambada_last_word" in said
    assert not [*tmp_path.iterdir()]


def test_sections_of_a_row_may_be_nested(tmp_path):
    rows = "++upgrade.rows={now:{},next:{deploy:{engine:vllm,vllm:{quantization:fp8}}}}"
    words = [*SAMPLE, rows, f"base_results_dir={tmp_path}"]
    found = command_lines_of_rows(config_of(*words[3:]), words)
    config = cast(Any, compose_config(found["next"]).config)
    assert (config.deploy.engine, config.deploy.vllm) == ("vllm", {"quantization": "fp8"})


def test_a_row_may_be_the_same_model_in_fp8(tmp_path):
    rows = "++upgrade.rows={source:{},fp8:{convert.fp8:block}}"
    words = [*SAMPLE, "convert.format=huggingface", rows, f"base_results_dir={tmp_path}"]
    config = config_of(*words[3:])
    assert not [each for each in problems_of_upgrade(config, ()) if "upgrade.rows" in each]
    found = map(compose_config, command_lines_of_rows(config, words).values())
    assert [cast(Any, each.config).convert.fp8 for each in found] == [None, "block"]


def test_each_row_has_its_keys_and_a_folder(tmp_path):
    rows = f"upgrade.rows={{now:{{}},next:{{{TP}:4,deploy.command:[a b,'c={{port}}']}}}}"
    words = [*SAMPLE, f"++{rows}", f"base_results_dir={tmp_path}"]
    found = command_lines_of_rows(config_of(*words[3:]), words)
    assert [*found] == ["now", "next"]
    composition = compose_config(found["next"])
    assert not composition.problems
    config = cast(Any, composition.config)
    assert config.action == "run"
    assert config.export.model.tensor_model_parallel_size == 4
    assert config.deploy.command == ["a b", "c={port}"]
    assert config.results_dir == tmp_path / "gpt_books_5m" / "upgrade" / "next"


@pytest.fixture
def outcomes(tmp_path, monkeypatch) -> list[Any]:
    """Return two rows that have ended, the second of which says nothing that is right."""
    options = EvaluationOptions(
        output_dir=Path(),
        data_dir=tmp_path,
        lambada=LambadaOptions(data_path=write_passages(tmp_path / "passages.jsonl")),
        latency=LatencyOptions(enabled=False),
    )
    model, found = partly_right_model(), []
    for name in ("now", "next"):
        evaluate(replace(options, output_dir=tmp_path / name), RunFacts(name), model=model)
        model.continuations.clear()
        model.log_prob = -3.0
        run = SimpleNamespace(
            name=name,
            status=0,
            jobs={},
            launcher=SimpleNamespace(in_foreground=True),
            records=dict,
            config=SimpleNamespace(evaluate=SimpleNamespace(output_dir=tmp_path / name)),
        )
        found.append(run)
    monkeypatch.setattr(upgrade, "run_rows", lambda *_, **__: 0)
    return found


def decided(outcomes: list[Any], tmp_path: Path) -> int:
    rows = "++upgrade.rows={now:{},next:{}}"
    config = config_of(rows, f"upgrade.output_dir={tmp_path}/page")
    return run_and_decide(config, outcomes, Console())


def test_the_rows_are_judged_and_drawn(outcomes, tmp_path, capsys):
    assert decided(outcomes, tmp_path) == 3
    assert "breached: next" in capsys.readouterr().out
    assert {each.name for each in (tmp_path / "page").iterdir()} == {
        "junit.xml", "upgrade.html", "upgrade.json", "upgrade.md",
    }  # fmt: skip


def test_a_row_that_failed_is_not_judged_by_an_earlier_report(outcomes, tmp_path):
    outcomes[1].status = 1
    assert decided(outcomes, tmp_path) == 4


def test_nothing_is_decided_without_the_first_row(outcomes, tmp_path, capsys):
    outcomes[0].status = 1
    assert decided(outcomes, tmp_path) == 1
    assert "nothing is decided" in capsys.readouterr().out
    assert not (tmp_path / "page").exists()


def test_rows_in_a_queue_are_judged_later(outcomes, tmp_path, capsys):
    outcomes[0].launcher.in_foreground = False
    outcomes[0].jobs = {"evaluate": None}
    assert decided(outcomes, tmp_path) == 0
    assert "the same command judges them" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bound",
    [
        "lambada_last_word={}",
        "lambada_last_word.min=null",
        "lambada_last_word={min:2,max:1}",
        "lambada_lastword.min=0.5",
    ],
)
def test_bounds_that_bound_nothing_are_refused(bound):
    config = config_of("++upgrade.rows={now:{},next:{}}", f"++upgrade.gate.{bound}")
    (problem,) = problems_of_upgrade(config, ())
    assert problem.startswith("upgrade.gate.lambada_last")


@pytest.mark.parametrize(
    "word", ["evaluate.output_dir=/tmp/one", "export.run.results_dir=/tmp/one", "deploy.keep=true"]
)
def test_rows_share_neither_a_folder_nor_a_server(word, tmp_path, capsys):
    words = ["upgrade.rows={now:{},next:{}}", word]
    assert main([*SAMPLE, *words, f"base_results_dir={tmp_path}"]) == 2
    assert f"{word} " in capsys.readouterr().err.replace(":", " ")
