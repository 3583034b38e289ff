"""Jobs on this machine: real processes through submitit, with stages that cost nothing."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher_scripts import actions
from launcher_scripts.actions import live_job_problem, read_job
from launcher_scripts.configuration.compose import compose_config
from launcher_scripts.configuration.schema import Config
from launcher_scripts.console import Console
from launcher_scripts.job_folder import prepare_submission
from launcher_scripts.launchers.base import Job
from launcher_scripts.launchers.local import LocalHandle, LocalLauncher
from launcher_scripts.main import main
from launcher_scripts.pipeline import PlannedStage
from launcher_scripts.run import Run
from stages import record
from stages.base import Stage, Summary
from stages.progress import Progress
from stages.record import read_record, write_record
from tests.conftest import present
from tests.unit.launcher_scripts.toy_stages import (
    EnvironmentStage,
    ServeStage,
    SleepStage,
    StubbornStage,
    WriteStage,
    settings,
)
from tests.waiting import lives, until

HERE = Path(__file__).parent


@cache
def composed() -> Config:
    words = [f"+env_vars.PYTHONPATH={HERE}", '+env_vars.GREETING="it\'s a $test"']
    return present(compose_config(words).config)


def make_run(*stages: Stage, setup: Sequence[str] = ()) -> tuple[Run, io.StringIO]:
    shown = io.StringIO()
    config = replace(composed(), cluster=replace(composed().cluster, setup=list(setup)))
    jobs = {stage.name: Job(stage, config) for stage in stages}
    planned = [PlannedStage(stage, stage.finding()) for stage in stages]
    return Run(LocalLauncher(config), Console(shown), planned, jobs), shown


def wait_for(path: Path) -> None:
    until(path.exists)


def test_a_record_that_another_user_damages_does_not_end_the_run(tmp_path):
    class DamagingStage(WriteStage):
        def run(self, progress: Progress) -> Summary:
            (self.job.folder / "job.json").write_text("{")
            return super().run(progress)

    run, shown = make_run(DamagingStage(settings(tmp_path, "write")))
    assert run.run_all(wait=False) == 0
    assert "write  completed" in shown.getvalue()


def test_finished_job_is_shown_with_its_results(tmp_path):
    run, shown = make_run(WriteStage(settings(tmp_path, "write")))
    assert run.run_all(wait=False) == 0
    record = read_record(tmp_path / "write" / "job.json")
    assert record is not None
    assert record.seconds is not None
    assert "working" in Path(record.log).read_text()
    assert "write  completed" in shown.getvalue()
    assert "out/target.txt\n" in shown.getvalue()  # below the folder, which is shown once
    assert f"results: {tmp_path}\n" in shown.getvalue()
    assert "lines: 1" in shown.getvalue()


def test_job_of_another_command_in_the_same_folder_is_not_shown_as_ones_own(
    tmp_path,
):
    run, _ = make_run(WriteStage(settings(tmp_path, "write")))
    assert run.run_all(wait=False) == 0
    path = tmp_path / "write" / "job.json"
    record = read_record(path)
    assert record is not None
    write_record(path, replace(record, job_id="another", state="failed"))
    assert "write  completed" in run.summary()


def test_failed_job_is_shown_cause_first_and_stops_the_next(tmp_path):
    run, shown = make_run(
        WriteStage(settings(tmp_path, "write"), fails="error"),
        EnvironmentStage(settings(tmp_path, "environment")),
    )
    assert run.run_all(wait=False) == 1
    text = shown.getvalue()
    assert "write failed: the disk is on fire; use water" in text
    assert text.index("the disk is on fire") < text.index("last lines of")
    assert "  | working" in text
    assert "not started" in text
    assert not (tmp_path / "environment").exists()


def test_job_ends_although_ctrl_c_came_while_its_process_was_polled(tmp_path):
    stage = SleepStage(settings(tmp_path, "sleep"))
    handle = make_run(stage)[0].submit("sleep")
    assert isinstance(handle, LocalHandle)
    wait_for(stage.target.with_suffix(".pid"))
    lock: Any = handle.process
    lock._waitpid_lock.acquire()  # as KeyboardInterrupt leaves it
    handle.stop(20)
    assert handle.poll() == "cancelled"


def test_killed_job_is_lost_and_says_so(tmp_path):
    run, shown = make_run(WriteStage(settings(tmp_path, "write"), fails="killed"))
    assert run.run_all(wait=False) == 1
    assert "ended without a result" in shown.getvalue()
    record = read_record(tmp_path / "write" / "job.json")
    assert record is not None
    assert record.state == "lost"


@pytest.mark.parametrize("line", ["exit 0", "exec true", "exec false"])
def test_job_whose_setup_ends_its_script_has_failed(tmp_path, line):
    stages = [
        WriteStage(settings(tmp_path, "write")),
        EnvironmentStage(settings(tmp_path, "environment")),
    ]
    run, _ = make_run(*stages, setup=[line])
    assert run.run_all(wait=False) == 1
    assert list(run.handles) == ["write"]
    found = read_record(tmp_path / "write" / "job.json")
    assert found is not None
    assert (found.state, found.exit_code) == ("failed", 1)


def test_job_that_ends_while_it_is_polled_has_failed(tmp_path, monkeypatch):
    run, _ = make_run(WriteStage(settings(tmp_path, "write")), setup=["exec false"])
    handle = run.submit("write")
    assert isinstance(handle, LocalHandle)
    os.waitid(os.P_PID, handle.process.pid, os.WEXITED | os.WNOWAIT)
    answers, poll = [None], handle.process.poll
    monkeypatch.setattr(handle.process, "poll", lambda: answers.pop() if answers else poll())
    assert handle.poll() == "failed"


def test_job_that_is_cancelled_during_its_setup_is_not_lost(tmp_path):
    begun = tmp_path / "begun"
    run, _ = make_run(
        WriteStage(settings(tmp_path, "write")), setup=[f"touch {begun}", "sleep 300"]
    )
    handle = run.submit("write")
    assert isinstance(handle, LocalHandle)
    wait_for(begun)
    os.kill(handle.process.pid, signal.SIGTERM)  # as action=cancel does
    until(lambda: handle.poll() is not None)
    found = read_record(tmp_path / "write" / "job.json")
    assert found is not None
    assert (handle.poll(), found.state) == ("cancelled", "cancelled")


def test_interrupt_while_a_job_is_started_leaves_no_process(tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    setup = [f"echo $$ > {pid_file}.new", f"mv {pid_file}.new {pid_file}", "sleep 300"]
    run, _ = make_run(WriteStage(settings(tmp_path, "write")), setup=setup)

    def interrupted(*_: object, **__: object) -> None:
        wait_for(pid_file)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(record, "update_record", interrupted)
        assert run.run_all(wait=False) == 130
    until(lambda: not lives(int(pid_file.read_text())))


def test_job_that_is_being_submitted_is_that_of_its_command(tmp_path):
    run, _ = make_run(WriteStage(settings(tmp_path, "write")))
    prepare_submission(run.jobs["write"], run.launcher, "")
    found = read_job(tmp_path, "write")
    assert found is not None
    assert found.state == "submitted"
    said = live_job_problem(found, Path("/a b")) or ""
    assert str(os.getpid()) in said
    assert "end it with action=cancel 'run_dir=/a b', or" in said  # as a shell takes it


def test_a_job_that_ends_while_it_is_looked_for_is_not_lost(tmp_path, monkeypatch):
    path = tmp_path / "write" / "job.json"
    host, process = os.uname().nodename, 1 << 30
    running = record.JobRecord("7", "write", "write", "running", host=host, process=process)
    done = replace(running, state="completed")
    write_record(path, running)
    look = actions._is_process_of

    def ended(*given: Any) -> bool:
        write_record(path, done)  # the last that the job does
        return look(*given)

    monkeypatch.setattr(actions, "_is_process_of", ended)
    assert read_job(tmp_path, "write") == read_record(path) == done


def test_running_job_is_found_through_a_link_to_its_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    stage = SleepStage(settings(tmp_path / "real", "sleep"))
    handle = make_run(stage)[0].submit("sleep")
    wait_for(stage.target.with_suffix(".pid"))
    found = read_job(tmp_path / "link", "sleep")
    handle.stop(20)
    assert found is not None
    assert found.state == "running"


def test_job_gets_its_variables_and_none_of_an_enclosing_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run, _ = make_run(EnvironmentStage(settings(tmp_path, "environment")))
    assert run.run_all(wait=False) == 0
    seen = json.loads((tmp_path / "out" / "target.txt").read_text())
    assert seen["GREETING"] == "it's a $test"
    assert seen["CUDA_VISIBLE_DEVICES"] == "1"
    assert not {"SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"} & set(seen)


def test_second_run_keeps_the_files_of_the_first(tmp_path):
    for _ in range(2):
        run, _ = make_run(WriteStage(settings(tmp_path, "write", overwrite=True)))
        assert run.run_all(wait=False) == 0
    folder = tmp_path / "write"
    kept = read_record(folder / "runs" / "1" / "job.json")
    latest = read_record(folder / "job.json")
    assert kept is not None
    assert latest is not None
    assert kept.job_id != latest.job_id
    assert (folder / "runs" / "1" / "write_submission.sh").exists()
    assert len(list(folder.glob("log-*.out"))) == 2


def test_full_disk_leaves_the_files_of_the_first_run_in_place(tmp_path, monkeypatch):
    first, _ = make_run(WriteStage(settings(tmp_path, "write")))
    assert first.run_all(wait=False) == 0
    folder = tmp_path / "write"
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write_text = Path.write_text

    def full(path: Path, text: str, **options: Any) -> int:
        if path.suffix == ".sh":  # the configuration, which is written before, still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text, **options)

    second, _ = make_run(
        WriteStage(settings(tmp_path, "write", overwrite=True)), setup=["echo other"]
    )
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            second.run_all(wait=False)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    assert not list(folder.glob("runs/*"))


def test_server_is_stopped_after_the_last_stage(tmp_path):
    run, shown = make_run(
        ServeStage(settings(tmp_path, "serve")), WriteStage(settings(tmp_path, "write"))
    )
    assert run.run_all(wait=False) == 0
    record = read_record(tmp_path / "serve" / "job.json")
    assert record is not None
    assert (record.state, record.summary) == ("completed", {"ended": "stopped"})
    assert not (tmp_path / "serve" / "endpoint.json").exists()
    assert "write" in shown.getvalue()


def test_interrupt_ends_the_job_and_its_processes(tmp_path):
    run, shown = make_run(SleepStage(settings(tmp_path, "sleep")))
    pid_file = tmp_path / "out" / "target.pid"

    def interrupt() -> None:
        wait_for(pid_file)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run.run_all(wait=False) == 130
    thread.join()
    assert not lives(int(pid_file.read_text()))
    record = read_record(tmp_path / "sleep" / "job.json")
    assert record is not None
    assert record.state == "cancelled"
    assert "cancelled" in shown.getvalue()


def test_second_interrupt_leaves_a_job_no_time_to_end(tmp_path):
    stage = StubbornStage(settings(tmp_path, "stubborn"))
    run, shown = make_run(stage)
    pid_file = tmp_path / "out" / "target.pid"

    def interrupt_twice() -> None:
        wait_for(pid_file)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stage.asked_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    started = time.monotonic()
    thread.start()
    assert run.run_all(wait=False) == 130
    thread.join()
    assert time.monotonic() - started < stage.stop_grace_s()
    assert not lives(int(pid_file.read_text()))
    assert "stubborn  cancelled" in shown.getvalue()


def test_second_interrupt_counts_from_the_moment_it_is_offered(tmp_path, monkeypatch):
    stage = StubbornStage(settings(tmp_path, "stubborn"))
    run, shown = make_run(stage)
    pid_file = tmp_path / "out" / "target.pid"
    say = run.console.say

    def say_and_interrupt(text: str = "") -> None:
        say(text)
        if text.startswith("stopping"):
            signal.raise_signal(signal.SIGINT)

    def interrupt() -> None:
        wait_for(pid_file)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run.console, "say", say_and_interrupt)
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run.run_all(wait=False) == 130
    thread.join()
    assert not lives(int(pid_file.read_text()))
    assert not stage.asked_path.exists()  # it was not asked to end
    assert "stubborn  cancelled" in shown.getvalue()


def test_job_is_stopped_although_the_reader_of_the_output_has_left(tmp_path):
    run, _ = make_run(SleepStage(settings(tmp_path, "sleep")))
    pid_file = tmp_path / "out" / "target.pid"
    reading, writing = os.pipe()
    run.console = Console(os.fdopen(writing, "w"))

    def interrupt() -> None:
        wait_for(pid_file)
        os.close(reading)  # as tee does, which gets the terminal's Ctrl-C too
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(BrokenPipeError):
        run.run_all(wait=False)
    thread.join()
    assert not lives(int(pid_file.read_text()))
    found = read_record(tmp_path / "sleep" / "job.json")
    assert found is not None
    assert found.state == "cancelled"


def test_interrupt_at_the_time_limit_ends_the_job_at_once(tmp_path):
    stage = StubbornStage(settings(tmp_path, "stubborn"))
    handle = make_run(stage)[0].submit("stubborn")
    assert isinstance(handle, LocalHandle)
    wait_for(stage.target.with_suffix(".pid"))

    def interrupt() -> None:
        wait_for(stage.asked_path)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    handle.ends_at = 0
    with pytest.raises(KeyboardInterrupt):
        handle.poll()
    thread.join()
    assert handle.poll() is None
    handle.stop(0)
    found = read_record(tmp_path / "stubborn" / "job.json")
    assert found is not None
    assert found.state == "failed"
    assert "time limit" in found.error


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_every_command_ends_by_signals_as_by_ctrl_c_unless_nohup_started_it(
    before,
):
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, before)
    try:
        assert main(["--version"]) == 0
        handlers = [signal.getsignal(each) for each in kept]
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    hung_up = signal.SIG_IGN if before == signal.SIG_IGN else signal.default_int_handler
    assert handlers == [signal.default_int_handler, hung_up]


def test_job_that_is_stopped_before_its_first_word_is_cancelled(tmp_path):
    run, _ = make_run(SleepStage(settings(tmp_path, "sleep")))
    handle = run.submit("sleep")
    handle.stop(0)
    assert handle.poll() == "cancelled"
    record = read_record(tmp_path / "sleep" / "job.json")
    assert record is not None
    assert record.state == "cancelled"


def test_server_that_was_never_ready_was_not_stopped_in_order(tmp_path):
    class LoadingStage(SleepStage):
        def readiness_path(self) -> Path:
            return self.job.folder / "endpoint.json"

    run, _ = make_run(LoadingStage(settings(tmp_path, "sleep")))

    def interrupt() -> None:
        wait_for(tmp_path / "out" / "target.pid")
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run.run_all(wait=False) == 130
    thread.join()


def test_job_ends_when_the_command_is_killed(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from tests.unit.launcher_scripts.test_run import make_run\n"
        "from tests.unit.launcher_scripts.toy_stages import SleepStage, settings\n"
        "make_run(SleepStage(settings(Path(sys.argv[3]), 'sleep')))[0].run_all(wait=False)\n"
    )
    root = HERE.parents[2]
    command = subprocess.Popen(
        [sys.executable, "-c", program, str(root), str(HERE), str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    pid_file = tmp_path / "out" / "target.pid"
    wait_for(pid_file)
    command.kill()
    command.wait()

    def is_cancelled() -> bool:
        record = read_record(tmp_path / "sleep" / "job.json")
        return record is not None and record.state == "cancelled"

    until(is_cancelled)
    until(lambda: not lives(int(pid_file.read_text())))


def test_finished_work_is_not_done_again(tmp_path):
    stage = WriteStage(settings(tmp_path, "write"))
    stage()
    stage.target.write_text("touched")
    assert stage() == {"metrics": {"lines": 1.0}}
    assert stage.target.read_text() == "touched"


def test_dry_run_of_finished_stages_says_how_they_run_again(tmp_path):
    run, shown = make_run(WriteStage(settings(tmp_path, "write")))
    run.jobs.clear()
    run.render()
    text = "dry run: nothing to do; overwrite=true runs finished stages again"
    assert shown.getvalue().strip() == text


def test_dry_run_writes_and_prints_every_script_and_starts_nothing(tmp_path):
    run, shown = make_run(
        ServeStage(settings(tmp_path, "serve")), WriteStage(settings(tmp_path, "write"))
    )
    run.render()
    for name in ("serve", "write"):
        script = tmp_path / name / f"{name}_submission.sh"
        assert script.read_text() in shown.getvalue()
        assert not (tmp_path / name / "job.json").exists()
    assert "export GREETING='it'\"'\"'s a $test'" in shown.getvalue()
    assert not (tmp_path / "out").exists()


def test_progress_that_cannot_be_read_ends_no_job(tmp_path):
    class DamagingStage(WriteStage):
        def run(self, progress: Progress) -> dict:
            progress.update("damaging")
            (self.job.folder / "progress.json").write_text("{")
            time.sleep(1)
            return super().run(Progress())

    run, _ = make_run(DamagingStage(settings(tmp_path, "write")))
    assert run.run_all(wait=False) == 0


def test_log_larger_than_memory_is_shown_by_its_end(tmp_path):
    class LoudStage(WriteStage):
        def run(self, progress: Progress) -> dict:
            sys.stdout.flush()
            os.truncate(1, 1 << 30)  # zeros that take no room
            os.lseek(1, 0, os.SEEK_END)
            sys.stdout.write("\nthe last words\n")
            return super().run(progress)

    run, stream = make_run(LoudStage(settings(tmp_path, "write"), fails="error"))
    tracemalloc.start()
    try:
        assert run.run_all(wait=False) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "  | the last words" in stream.getvalue()
