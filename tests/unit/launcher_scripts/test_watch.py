"""`action=watch`: every checkpoint once, in order; torn and deleted ones do not stop the others."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from inference.evaluation.task import Metric
from launcher_scripts.configuration.compose import Composition, compose_config
from launcher_scripts.configuration.diagnosis import hydra_text
from launcher_scripts.configuration.schema import Config, WatchSection
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import SubmissionError
from launcher_scripts.main import main
from launcher_scripts.trained_checkpoints import TrainedCheckpoint, find_checkpoints
from launcher_scripts.watch import Watch
from launcher_scripts.watch_state import Watched, WatchState
from stages.record import RECORD_NAME, JobRecord, read_record, write_record
from tests.conftest import ROOT
from tests.waiting import until

SAMPLE = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "a run's" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def arrive(run: Path, step: int) -> Path:
    path = run / f"gpt--step={step}.nemo"
    partial = run.parent / "partial"
    shutil.copyfile(SAMPLE, partial)
    return partial.rename(path)


def words(tmp_path: Path, *more: str) -> list[str]:
    return [
        "action=watch", "export=gpt3/sample", "stages=[convert]", "watch.settle_s=0",
        "watch.poll_s=0.05", "watch.patience_s=0.5", "watch.idle_s=0",
        f"base_results_dir={tmp_path}", f'export.run.training_dir="{tmp_path}/a run\'s"', *more,
    ]  # fmt: skip


def watch(tmp_path: Path, *more: str) -> tuple[int, dict[int, Watched]]:
    status = main(words(tmp_path, *more))
    (path,) = (tmp_path / "gpt_books_5m").glob("watch_*/watch.json")
    state = WatchState(WatchSection(path.parent), tmp_path / "a run's")
    state.read()
    return status, state.watched


def test_checkpoints_are_converted_in_order_and_only_once(tmp_path, run, capsys):
    arrive(run, 20)
    arrive(run, 10)
    status, watched = watch(tmp_path, "watch.keep=0", "watch.parallel=2")
    assert status == 0
    assert [each.state for each in watched.values()] == ["evaluated"] * 2
    shown = capsys.readouterr().out
    assert shown.index("step_0000010/convert") < shown.index("step_0000020/convert")
    assert main(["action=status", f"base_results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.count("completed") == 2  # of all that ran at once
    assert not list(tmp_path.rglob("*-gpu"))
    assert list(tmp_path.rglob("convert/job.json"))
    arrive(run, 30)
    status, watched = watch(tmp_path)
    assert [each.attempts for each in watched.values()] == [1, 1, 1]


def test_a_run_that_does_not_exist_yet_is_named_and_what_no_checkpoint_could_mend(tmp_path, capsys):
    assert main(words(tmp_path, "watch.idle_s=0.1")) == 1
    shown = capsys.readouterr().out
    assert f"watching {tmp_path}/a run's, which does not exist yet; " in shown
    assert f"no checkpoint was found in {tmp_path}/a run's" in shown
    (tmp_path / "file").touch()
    wrong = [f"watch.output_dir={tmp_path}/file", "stages=[convert,serve]"]
    assert main(words(tmp_path, *wrong)) == 2
    said = capsys.readouterr().err
    assert said.startswith("2 problems found; nothing was started:")
    assert f"watch.output_dir={tmp_path}/file: {tmp_path}/file is not a" in said
    assert "stages names 'serve'" in said


def test_torn_and_deleted_checkpoints_are_passed_over(tmp_path, run):
    torn = arrive(run, 10)
    torn.write_bytes(torn.read_bytes()[:3_000_000])
    arrive(run, 20)
    status, watched = watch(tmp_path)
    assert status == 0
    assert [each.state for each in watched.values()] == ["passed over", "evaluated"]
    assert "truncated or damaged" in watched[10].problem

    (state,) = (tmp_path / "gpt_books_5m").glob("watch_*/watch.json")
    values = json.loads(state.read_text())
    values["watched"].append({**values["watched"][1], "step": 30, "state": "waiting"})
    values["watched"][2]["path"] = str(run / "gone.nemo")
    state.write_text(json.dumps(values))
    assert watch(tmp_path)[1][30].state == "gone"


def test_folder_that_cannot_be_read_for_a_moment_ends_no_watch(tmp_path, run, monkeypatch, capsys):
    looks = itertools.count()

    def find(folder: Path) -> list[TrainedCheckpoint]:
        if (look := next(looks)) in (1, 2):
            raise OSError(errno.ESTALE, "Stale file handle", str(folder))
        if look == 3:
            arrive(run, 20)
        return find_checkpoints(folder)

    arrive(run, 10)
    monkeypatch.setattr("launcher_scripts.watch.find_checkpoints", find)
    status, watched = watch(tmp_path, "watch.until_step=20", "watch.idle_s=60")
    assert status == 0
    assert [each.state for each in watched.values()] == ["evaluated"] * 2
    trouble = f"cannot read the run's folder, retrying: {tmp_path}/a run's: Stale file handle\n"
    assert capsys.readouterr().out.count(trouble) == 1


def test_failed_pipelines_are_started_again_a_bounded_number_of_times(tmp_path, run):
    arrive(run, 10)
    status, watched = watch(tmp_path, "+env_vars.PYTHONHOME=/nowhere", "watch.retries=1")
    assert status == 1
    assert (watched[10].state, watched[10].attempts) == ("failed", 2)


@pytest.mark.parametrize(
    ("jobs", "state"),
    [
        ({"convert": "completed", "evaluate": "cancelled"}, "failed"),
        ({"convert": "failed", "evaluate": "cancelled"}, "waiting"),
    ],
)
def test_a_pipeline_that_a_user_cancels_is_not_started_again(tmp_path, jobs, state):
    """Unless another watch had begun it, or a job of it has failed."""
    config = compose_config(words(tmp_path, "cluster=bcm", "cluster_type=bcm")).config
    assert config is not None
    watch = Watch(config, (), compose_config, Console())
    each = Watched(10, str(tmp_path), None, "running", attempts=1, jobs=[*jobs])
    watch.state.watched[10] = each
    for stage, found in jobs.items():
        path = watch.state.results_of(10) / stage / RECORD_NAME
        write_record(path, JobRecord("1", stage, stage, found, "bcm"))
    watch._follow_one(each)
    assert each.state == state
    each.state, each.attempts = "running", 1
    watch._resume(each)
    assert (each.state, each.attempts) == (("waiting", 0) if state == "failed" else ("running", 1))


@pytest.mark.soak
def test_watch_that_is_killed_loses_no_checkpoint_and_repeats_none(tmp_path, run, soak):
    """A kill is not a failure of the pipeline: its attempt does not count."""
    moments, steps = random.Random(7), range(10, 10 + 20 * soak, 10)
    killed: set[str] = set()

    def running() -> str:
        """Return the job that runs now, empty if there is none that was not killed."""
        for path in tmp_path.rglob("convert/job.json"):
            job = json.loads(path.read_text())
            if job["state"] == "running" and job["job_id"] not in killed:
                return str(job["job_id"])
        return ""

    for step in steps:
        arrive(run, step)
        with subprocess.Popen(
            [sys.executable, "main.py", *words(tmp_path, "watch.retries=0", "watch.parallel=2")],
            cwd=ROOT, stdout=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            until(lambda: running() != "", "a job that runs")
            killed.add(running())
            time.sleep(moments.uniform(0, 0.3))
            process.kill()
    status, watched = watch(tmp_path, "watch.retries=0")
    assert status == 0
    assert {step: (each.state, each.attempts) for step, each in watched.items()} == dict.fromkeys(
        steps, ("evaluated", 1)
    )


def test_a_pipeline_that_ended_unseen_is_taken_over(tmp_path, run, capsys):
    """As by the last job of a watch that was killed: nothing is left to run."""
    checkpoint = arrive(run, 10)
    assert watch(tmp_path)[0] == 0
    (path,) = tmp_path.rglob("watch.json")
    state = json.loads(path.read_text())
    for each in state["watched"]:
        each |= {"state": "waiting", "attempts": 0, "jobs": []}
    path.write_text(json.dumps(state))
    results = path.with_name("step_0000010")
    assert not (results / "model_repo").exists()
    again = [f"export.model.checkpoint_path={hydra_text(str(checkpoint))}", "stages=[convert]"]
    assert main(["export=gpt3/sample", *again, f"export.run.results_dir={results}"]) == 0
    job = read_record(results / "convert" / RECORD_NAME)
    status, watched = watch(tmp_path)
    assert (status, watched[10].state, watched[10].attempts) == (0, "evaluated", 1)
    assert read_record(results / "convert" / RECORD_NAME) == job


def test_a_first_job_that_is_refused_is_a_failed_attempt(tmp_path, run, monkeypatch, capsys):
    def refuse(*_: Any, **__: Any) -> None:
        raise SubmissionError("another command has submitted convert in the meantime")

    arrive(run, 10)
    monkeypatch.setattr("launcher_scripts.run.Run.submit", refuse)
    status, watched = watch(tmp_path, "watch.retries=0")
    assert (status, watched[10].state, watched[10].attempts) == (1, "failed", 1)
    assert "another command has submitted convert in the meantime" in watched[10].problem


def test_wrong_configuration_is_refused_before_anything_is_waited_for(tmp_path, run, capsys):
    arrive(run, 10)
    assert main(words(tmp_path, "export.model.tensor_model_parallel_size=3")) == 2
    assert "export.model.tensor_model_parallel_size=3" in capsys.readouterr().err
    assert main(["action=watch", "export=gpt3/sample", "export.run.training_dir=null"]) == 2
    assert "export.run.training_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    [
        "export.run.results_dir=/r", "export.model.checkpoint_path=/c", "deploy.http_port=1",
        "evaluate.output_dir=/r", "export.triton_deployment.triton_model_dir=/r/m",
        "deploy.keep=true",
    ],
)  # fmt: skip
def test_a_setting_that_cannot_hold_for_every_checkpoint_is_refused(word, tmp_path, capsys):
    assert main(words(tmp_path, word)) == 2
    assert f"  - {word}" in capsys.readouterr().err


def test_a_dry_run_shows_what_is_there_and_starts_nothing(tmp_path, run, capsys):
    arrive(run, 10)
    assert main(words(tmp_path, "dry_run=true")) == 0
    assert "10    waiting" in capsys.readouterr().out
    assert not (tmp_path / "gpt_books_5m").exists()


class FakeLauncher:
    in_foreground = True

    def queue_slots(self) -> None:
        return None


class FakeRun:
    """A pipeline that ends when it is looked at for the second time, or is interrupted."""

    alive: ClassVar[list[FakeRun]] = []
    most = 0
    started: ClassVar[list[int]] = []
    interrupt_at: ClassVar[int | None] = None
    launcher = FakeLauncher()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.jobs = {"convert": SimpleNamespace(stage=None)}
        self.handles = {"convert": None}
        self.looks = 0

    def has_ended(self) -> bool:
        return False

    def begin(self) -> None:
        type(self).alive.append(self)
        type(self).most = max(self.most, len(self.alive))
        self.started.append(int(self.config.export.model.checkpoint_path.name.rpartition("-")[2]))

    def advance(self) -> int | None:
        if self.interrupt_at is not None and len(self.started) >= self.interrupt_at:
            raise KeyboardInterrupt
        self.looks += 1
        return 0 if self.looks > 1 else None

    def stop_all(self, notice: str = "") -> None:
        self.alive.remove(self)
        if not notice:
            record = JobRecord("1", "convert", "convert", "completed")
            write_record(self.config.results_dir / "convert" / RECORD_NAME, record)

    def summary(self) -> str:
        return ""


def for_one(config: Config, words: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """Return a copy of a configuration for the checkpoint that words choose, and the words."""
    pairs = (word.split("=", 1) for word in words)
    chosen = {key: value.strip("'\"") for key, value in pairs}
    one = copy.deepcopy(config)
    one.export.model.checkpoint_path = Path(chosen["export.model.checkpoint_path"])
    results = Path(chosen["export.run.results_dir"])
    one.export.run = replace(one.export.run, results_dir=results)
    return one, chosen


def test_a_run_that_is_over_is_back_filled_coarse_to_fine_and_many_at_a_time(
    tmp_path, run, monkeypatch
):
    steps = range(0, 1000, 10)
    for step in steps:
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "trainer_state.json").touch()
    overrides = words(tmp_path, "watch.parallel=8", "watch.order=spread")
    config = compose_config(overrides).config
    assert config is not None

    def prepare(composition: Composition, *_: Any, name: str) -> tuple[FakeRun, list[str]]:
        assert composition.config is not None
        return FakeRun(composition.config), []

    monkeypatch.setattr("launcher_scripts.watch.prepare_run", prepare)
    monkeypatch.setattr("launcher_scripts.watch._ADVANCE_S", 0)
    for interrupted in (27, 70, None):
        monkeypatch.setattr(FakeRun, "interrupt_at", interrupted)
        watch = Watch(
            config, overrides, lambda words: Composition(for_one(config, words)[0]), Console()
        )
        assert watch.run() == (0 if interrupted is None else 130)
        assert not FakeRun.alive
    watched = watch.state.watched
    assert {step: (each.state, each.attempts) for step, each in watched.items()} == dict.fromkeys(
        steps, ("evaluated", 1)
    )
    assert FakeRun.most == 8
    assert FakeRun.started[:3] == [990, 0, 500]
    assert set(FakeRun.started) == set(steps)
    assert len(FakeRun.started) <= len(steps) + 2 * 8  # those that were interrupted
    page = (watch.state.folder / "watch.html").read_text()
    assert "The watch has ended." in page
    assert 'http-equiv="refresh"' not in page


class ServedRun(FakeRun):
    """A pipeline of `watch.exchange`: one with a server of its own, or that asks another's."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shared = config.evaluate.shared_server
        names = ("convert", "evaluate") if self.shared else ("convert", "deploy", "evaluate")
        self.jobs = {name: SimpleNamespace(stage=None) for name in names}
        self.handles = dict.fromkeys(names)
        self.fails = False
        if self.shared is None:
            self.note("deploy", "running")

    def note(self, stage: str, state: str) -> None:
        record = JobRecord("1", stage, stage, state)
        write_record(self.config.results_dir / stage / RECORD_NAME, record)

    def advance(self) -> int | None:
        if super().advance() is None:
            return None
        self.note("convert", "completed")
        self.note("evaluate", "failed" if self.fails else "completed")
        self.alive.remove(self)
        return int(self.fails)

    def stop_all(self, notice: str = "") -> None:
        del notice
        if self.shared is None:
            self.note("deploy", "completed")


def test_each_of_the_pipelines_at_a_time_keeps_one_server(tmp_path, run, monkeypatch):
    """One whose server ends begins with another; the checkpoint has lost no attempt by that."""
    for step in range(7):
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "trainer_state.json").touch()
    overrides = words(
        tmp_path, "watch.parallel=2", "watch.exchange=true", "stages=[convert,deploy,evaluate]",
        "watch.retries=0",
    )  # fmt: skip
    config = compose_config(overrides).config
    assert config is not None
    runs: list[ServedRun] = []

    def compose(words: Sequence[str]) -> Composition:
        one, chosen = for_one(config, words)
        shared = chosen.get("evaluate.shared_server")
        one.evaluate = replace(one.evaluate, shared_server=Path(shared) if shared else None)
        assert (chosen.get("deploy.keep") == "true") == (shared is None)
        assert ("deploy" in chosen["stages"]) == (shared is None)
        return Composition(one)

    def prepare(composition: Composition, *_: Any, name: str) -> tuple[ServedRun, list[str]]:
        assert composition.config is not None
        runs.append(ServedRun(composition.config))
        if len(runs) == 5 and runs[-1].shared:  # its server has ended
            runs[-1].fails = True
            gone = Path(runs[-1].shared) / RECORD_NAME
            write_record(gone, JobRecord("1", "deploy", "deploy", "completed"))
        return runs[-1], []

    monkeypatch.setattr("launcher_scripts.watch.prepare_run", prepare)
    monkeypatch.setattr("launcher_scripts.watch._ADVANCE_S", 0)
    monkeypatch.setattr(FakeRun, "interrupt_at", None)
    watch = Watch(config, overrides, compose, Console())
    assert watch.run() == 0
    watched = watch.state.watched.values()
    assert [(each.state, each.attempts) for each in watched] == [("evaluated", 1)] * 7
    assert sum(each.shared is None for each in runs) == 3
    assert len(runs) == 8
    assert watch.state.held == {}
    assert {read_record(each.config.results_dir / "deploy" / RECORD_NAME).state  # type: ignore[union-attr]
            for each in runs if each.shared is None} == {"completed"}  # fmt: skip


@pytest.mark.parametrize(
    ("jobs", "records", "problem"),
    [
        ([], {}, "lacks the record of a job"),
        (["convert"], {}, "lacks the record of a job"),
        (["convert", "evaluate"], {"convert": "completed"}, "lacks the record of a job"),
        (["deploy"], {"deploy": "failed"}, "deploy: no GPU"),
        (["convert", "deploy"], {"convert": "completed", "deploy": "failed"}, "deploy: no GPU"),
    ],
)
def test_a_pipeline_without_an_evaluation_has_failed(tmp_path, jobs, records, problem):
    """With `watch.exchange` its server may stay, but not if nothing follows it."""
    config = compose_config(words(tmp_path, "watch.retries=0")).config
    assert config is not None
    watch = Watch(config, (), compose_config, Console())
    each = Watched(10, str(tmp_path), None, "running", attempts=1, jobs=jobs, server=10)
    watch.state.watched[10] = each
    for stage, state in records.items():
        error = "no GPU" if state == "failed" else ""
        path = watch.state.results_of(10) / stage / RECORD_NAME
        write_record(path, JobRecord("1", stage, stage, state, error=error))
    watch._follow_one(each)
    assert each.state == "failed"
    assert problem in each.problem


def test_a_report_that_somebody_has_changed_is_a_failed_attempt(tmp_path):
    config = compose_config(words(tmp_path, "watch.retries=0")).config
    assert config is not None
    watch = Watch(config, (), compose_config, Console())
    each = Watched(10, str(tmp_path), None, "running", attempts=1, jobs=["evaluate"])
    watch.state.watched[10] = each
    (tmp_path / "report.json").write_text("{")
    watch._take_figures(each, tmp_path / "report.json", "")
    assert each.state == "failed"
    assert "report.json is not a JSON object" in each.problem


def test_servers_are_kept_only_where_others_may_ask_them(tmp_path, capsys):
    assert main(words(tmp_path, "watch.exchange=true", "deploy.server=tritonserver")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "watch.exchange=true needs deploy in stages and evaluate in stages;" in said
    assert "deploy.server=tritonserver: only this project's own server" in said


@pytest.mark.parametrize(("order", "first"), [("oldest", 0), ("newest", 20)])
def test_the_order_of_checkpoints_is_chosen(tmp_path, order, first):
    config = compose_config(words(tmp_path, f"watch.order={order}")).config
    assert config is not None
    watch = Watch(config, (), compose_config, Console())
    watch.state.watched = {step: Watched(step, "") for step in (0, 10, 20)}
    chosen = watch._next()
    assert chosen is not None
    assert chosen.step == first


def judged(tmp_path: Path, values: list[float], *more: str, **changes: Any) -> WatchState:
    """Return the state after evaluations that found `values`."""
    words = ["export=gpt3/sample", f"base_results_dir={tmp_path}", *more]
    config = compose_config(words).config
    assert config is not None
    made = Watch(config, words, compose_config, Console())
    for step, value in enumerate(values):
        figure = Metric("acc", "acc", value, 0.05, value - 0.1, value + 0.1, count=100, **changes)
        each = Watched(step, "", state="evaluated", attempts=1, metrics={"acc": figure})
        (made.state.results_of(step) / "model_repo").mkdir(parents=True)
        made.state.watched[step] = each
        made.state.judge(each, may_be_best=value < 0.9)
    made.state.keep_the_best()
    return made.state


def test_a_figure_that_no_report_has_is_named_and_ends_nothing(tmp_path):
    state = judged(tmp_path, [0.2], "watch.metric=accc")
    assert state.watched[0].verdict == "watch.metric=accc is not one of its figures: acc"
    assert state.best is None


@pytest.mark.parametrize(("higher", "best"), [(True, 1), (False, 0)])
def test_the_best_sound_checkpoint_is_named_and_its_repository_kept(tmp_path, higher, best):
    state = judged(tmp_path, [0.2, 0.5, 0.4, 0.95], higher_is_better=higher)
    assert state.best == best
    named = json.loads(next(tmp_path.rglob("best.json")).read_text())
    assert (named["step"], named["metric"]) == (best, "acc")
    kept = [state.results_of(each) / "model_repo" for each in state.watched]
    assert [path.is_dir() for path in kept] == [step == (3 if higher else 0) for step in range(4)]


def test_only_what_lies_in_the_folder_of_the_watch_is_deleted(tmp_path, run):
    """The state of a watch may be another one's: of a copied folder, or made by hand."""
    victim = tmp_path / "victim" / "model_repo"
    victim.mkdir(parents=True)
    folder = tmp_path / "watch"
    (folder / "step_0000002" / "model_repo").mkdir(parents=True)
    (folder / "step_0000001").symlink_to(victim.parent)
    watched: list[dict[str, Any]] = [
        {"step": step, "path": str(run / "gone"), "state": "failed", "metrics": {}, "attempts": 1}
        | {"repository": str(victim), "results_dir": str(victim.parent)}
        for step in (1, 2)
    ]
    values = {"run": f"{tmp_path}/a run's", "best": None, "watched": watched}
    (folder / "watch.json").write_text(json.dumps(values))
    main(words(tmp_path, f"watch.output_dir={folder}"))
    assert victim.is_dir()
    assert not (folder / "step_0000002" / "model_repo").exists()


@pytest.mark.parametrize(
    ("gated", "words", "best"),
    [
        ((), [], 2),  # the perplexity
        ((), ["watch.metric=acc"], 1),
        (("acc",), [], 1),
        (("f1", "ppl"), [], 2),  # the f1 is the same in all
    ],
)
def test_the_best_is_the_better_by_the_first_figure_that_differs(tmp_path, gated, words, best):
    state = judged(tmp_path, [], *words)
    state.gated = gated
    for step, (acc, ppl) in enumerate([(0.1, 98.0), (0.2, 74.0), (0.1, 71.0)]):
        figures = {"acc": acc, "f1": 0.0, "ppl": ppl}
        metrics = {
            name: Metric(name, name, value, 0.0, value, value, count=64)
            for name, value in figures.items()
        }
        metrics["ppl"] = replace(metrics["ppl"], unit="perplexity", higher_is_better=False)
        each = state.watched[step] = Watched(step, "", state="evaluated", metrics=metrics)
        state.judge(each, may_be_best=True)
    assert state.best == best


def test_best_that_is_none_of_the_checkpoints_is_forgotten(tmp_path):
    saved = {"run": str(tmp_path), "best": 5, "watched": [], "held": {}}
    (tmp_path / "watch.json").write_text(json.dumps(saved))
    state = WatchState(WatchSection(tmp_path), tmp_path)
    state.read()
    assert state.best_checkpoint is None
