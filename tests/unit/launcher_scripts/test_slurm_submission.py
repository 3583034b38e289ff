"""sbatch that fails although the job is queued, and a controller that is away for a while."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from launcher_scripts.actions import jobs_in
from launcher_scripts.job_folder import prepare_submission
from launcher_scripts.launchers import slurm_state
from launcher_scripts.launchers.base import Job, SubmissionError
from launcher_scripts.launchers.slurm import SlurmHandle, end_without_evaluation
from launcher_scripts.main import main
from stages.deploy import DeployStage
from stages.deploy_config import DeployConfig
from stages.endpoint import STOP_NAME
from stages.record import RECORD_NAME, JobRecord, now, write_record
from tests.integration.slurm_runs import make_run
from tests.unit.launcher_scripts.test_slurm_checks import programs
from tests.unit.launcher_scripts.toy_stages import WriteStage, settings

LOST = "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"
REFUSED = "echo 'sbatch: error: Invalid qos specification' >&2; exit 1"


@pytest.fixture(autouse=True)
def slurm(tmp_path, monkeypatch) -> Path:
    """Commands that keep a queue in a file, whose sbatch is up to the test; return their folder."""
    folder = tmp_path / "bin"
    queue = tmp_path / "queue"
    queue.touch()
    programs(
        folder, squeue=f"cat {queue}", scancel=f"echo $1 >> {tmp_path}/cancelled", sinfo="exit 1",
        take=f'n=$(wc -l < {queue}); echo "$((n+7))|PENDING|None|$1" >> {queue}',
    )  # fmt: skip
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_state, "_FIRST_PAUSE_S", 0.01)
    return folder


def submit(tmp_path: Path, *, patience_s: float = 2.0) -> SlurmHandle:
    run = make_run(WriteStage(settings(tmp_path, "write")))
    prepare_submission(run.jobs["write"], run.launcher, "")
    handle = run.launcher.submit(run.jobs["write"], patience_s=patience_s)
    assert isinstance(handle, SlurmHandle)
    return handle


def test_queued_job_whose_answer_is_lost_is_found(tmp_path, slurm):
    programs(slurm, sbatch=f'take "$1"; {LOST}')
    assert submit(tmp_path).job_id == "7"
    assert (tmp_path / "write" / "submitit" / "7_submitted.pkl").is_file()


def test_job_that_was_not_taken_is_submitted_again(tmp_path, slurm):
    once = f"[ -e {tmp_path}/once ] || {{ touch {tmp_path}/once; {LOST}; }}"
    programs(slurm, sbatch=f'{once}; take "$1"; echo Submitted batch job 7')
    assert submit(tmp_path).job_id == "7"


def test_of_jobs_that_were_taken_twice_one_stays(tmp_path, slurm):
    programs(slurm, sbatch=f'take "$1"; take "$1"; {LOST}')
    assert submit(tmp_path).job_id == "7"
    assert (tmp_path / "cancelled").read_text().split() == ["8"]


def test_a_job_that_is_queued_as_ctrl_c_comes_is_cancelled(tmp_path, slurm):
    programs(slurm, sbatch='take "$1"; kill -INT $PPID; sleep 1; echo Submitted batch job 7')
    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path)
    assert (tmp_path / "cancelled").read_text().split() == ["7"]


@pytest.mark.parametrize(("text", "said"), [(REFUSED, "Invalid qos"), (LOST, "Socket timed out")])
def test_refusal_is_final_and_silence_ends(tmp_path, slurm, text, said):
    programs(slurm, sbatch=text)
    with pytest.raises(SubmissionError, match=said):
        submit(tmp_path, patience_s=0.1)


def test_what_a_killed_command_was_about_to_submit_is_given_up(tmp_path):
    path = tmp_path / "convert" / "job.json"
    claim = JobRecord("", "convert", "c", "submitted", "bcm", host=socket.gethostname())
    for process, state in ((os.getpid(), "submitted"), (1 << 30, "lost")):
        write_record(path, replace(claim, process=process, submitted_at=now()))
        (found,) = jobs_in(tmp_path)
        assert found.state == state
    # Another process may have got the id of the command, and the clock may have been set back.
    for year in (2026, 2099):
        at = f"{year}-01-01T00:00:00+00:00"
        write_record(path, replace(claim, process=os.getpid(), submitted_at=at))
        (found,) = jobs_in(tmp_path)
        assert found.state == "lost"


def test_an_ended_job_that_was_requeued_waits_again(tmp_path, slurm):
    folder = tmp_path / "convert"
    script = folder / "submitit" / "1.sh"
    write_record(folder / "job.json", JobRecord("7", "other", "c", "failed", "local"))
    for word, state in (("COMPLETING", "failed"), ("PENDING", "submitted")):
        programs(slurm, squeue=f"echo '7|{word}|JobHeldUser|{script}'")
        (found,) = jobs_in(tmp_path)
        facts = (found.job_id, found.stage, found.cluster, found.state)
        assert facts == ("7", "convert", "bcm", state)


def test_a_requeued_job_shows_why_it_waits(tmp_path, slurm, capsys):
    path = tmp_path / "convert" / "job.json"
    write_record(path, JobRecord("7", "convert", "c", "running", "bcm", error="stopped"))
    programs(slurm, squeue=f"echo '7|PENDING|BeginTime|{path.parent}/submitit/1.sh'")
    assert main(["action=status", f"run_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "convert: in the queue: BeginTime" in shown
    assert "stopped" not in shown


def test_the_second_of_two_commands_that_submit_at_once_is_refused(tmp_path):
    first, second = (make_run(WriteStage(settings(tmp_path, "write"))) for _ in range(2))
    prepare_submission(first.jobs["write"], first.launcher, "")
    with pytest.raises(SubmissionError, match="another command"):
        prepare_submission(second.jobs["write"], second.launcher, "")


def test_server_ends_with_an_evaluation_that_cannot_ask_for_that(tmp_path, slurm):
    """It is cancelled before it starts, or its command was killed before it submitted it."""
    del slurm
    stage = DeployStage(settings(tmp_path, "deploy"), DeployConfig(folder=tmp_path, model_name="m"))
    job = Job(stage, make_run().config)
    stop, queue = tmp_path / "deploy" / STOP_NAME, tmp_path / "queue"
    evaluation = JobRecord("8", "evaluate", "e", "running", "bcm", submitted_at=now())
    path = tmp_path / "evaluate" / RECORD_NAME

    def asks(deployed: str, state: str | None, submitted: str = evaluation.submitted_at) -> bool:
        write_record(
            job.record_path, replace(evaluation, job_id="7", stage="deploy", submitted_at=deployed)
        )
        path.unlink(missing_ok=True)
        if state is not None:
            write_record(path, replace(evaluation, state=state, submitted_at=submitted))
        stop.unlink(missing_ok=True)
        end_without_evaluation(job)
        return stop.exists()

    now_, long_ago = evaluation.submitted_at, "2026-01-01T00:00:00+00:00"
    script = tmp_path.resolve() / "evaluate" / "submitit" / "a.sh"
    queue.write_text(f"8|RUNNING|None|{script}\n")
    assert not asks(now_, "running")
    assert not asks(long_ago, None)  # a user has deleted its record
    assert asks(now_, "cancelled")
    assert not asks(now_, "completed", long_ago)  # of an earlier run; the next is submitted now
    queue.write_text("")
    assert not asks(now_, None)
    assert asks(long_ago, None)
    assert asks(long_ago.replace("2026", "2099"), None)  # the clock was set back
