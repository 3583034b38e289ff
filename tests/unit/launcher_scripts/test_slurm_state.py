"""Records corrected from Slurm, with small scripts in place of Slurm's commands."""

import shutil
from pathlib import Path

import pytest

from launcher_scripts.launchers import slurm_state
from launcher_scripts.launchers.slurm_state import (
    SlurmJobState,
    ask_slurm,
    jobs_below,
    queue_now,
    reconcile,
)
from stages.record import RUNNING, SUBMITTED, JobRecord, write_record

UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_CONTROLLER = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return a folder that is on PATH before everything else, and alone has Slurm's commands."""
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", f"{path}:/bin")
    for name in ("squeue", "scontrol", "sacct"):
        program(path, name, UNKNOWN_JOB)
    return path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def settled(tmp_path: Path, state: str = RUNNING, **facts: str) -> JobRecord:
    path = tmp_path / "convert" / "job.json"
    write_record(path, JobRecord("12", "convert", "c", state, cluster="bcm", **facts))  # type: ignore[arg-type]
    found = reconcile(path)
    assert found is not None
    return found


@pytest.mark.parametrize("answer", [NO_CONTROLLER, None])
def test_nothing_is_concluded_from_a_slurm_that_does_not_answer(tmp_path, folder, answer):
    if answer is None:
        (folder / "squeue").unlink()
    else:
        program(folder, "squeue", answer)
    assert settled(tmp_path).state == "running"


def test_job_without_any_record_is_lost(tmp_path):
    found = settled(tmp_path)
    assert (found.state, found.exit_code) == ("lost", None)
    assert "Slurm no longer knows the job" in found.error


def test_file_of_ended_jobs_is_asked_where_there_is_no_accounting(tmp_path, folder):
    program(folder, "sacct", 'case "$*" in -c*) echo CANCELLED;; *) exit 1;; esac')
    assert settled(tmp_path).state == "cancelled"


def test_job_whose_predecessor_failed_says_so(tmp_path, folder):
    program(folder, "squeue", "exit 0")
    program(folder, "scontrol", "echo JobState=CANCELLED Reason=DependencyNeverSatisfied")
    found = settled(tmp_path, SUBMITTED, dependency="afterok:11")
    assert found.error == "never started: its dependency (afterok:11) did not succeed"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("TIMEOUT", "time_limit"), ("OUT_OF_MEMORY", "mem_gb"), ("NODE_FAIL", "submit it again")],
)
def test_ends_that_only_slurm_knows_of_come_with_a_remedy(tmp_path, folder, word, remedy):
    program(folder, "scontrol", f"echo JobState={word} Reason=None ExitCode=3:0")
    found = settled(tmp_path, started_at="2024-01-01T00:00:00+00:00")
    assert found.state == "failed"
    assert f"{word} with exit code 3:0" in found.error
    assert remedy in found.error


def test_success_counts_only_with_the_word_of_the_job(tmp_path, folder):
    program(folder, "scontrol", "echo JobState=COMPLETED Reason=None")
    assert "did not begin its stage (see cluster.setup)" in settled(tmp_path).error
    assert settled(tmp_path, ended_at="2024-01-01T00:00:00+00:00").state == "completed"


def described(folder: Path, line: str) -> SlurmJobState:
    program(folder, "squeue", f"echo '12|{line}'")
    found = queue_now("12").state("12")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("PENDING|Resources|/x", "Resources"),
        ("PENDING|job requeued in held state|/a b", "job requeued in held state"),
        ("RUNNING|None|/x", ""),
        ("SUSPENDED|None|/x", "SUSPENDED"),
        ("PENDING|Priority|/x|FAILED|none", "Priority"),
    ],
)
def test_queued_job_shows_its_reason_to_wait(folder, line, reason):
    assert described(folder, line).waits_for == reason


def test_nothing_is_said_of_jobs_by_a_controller_that_is_away(folder):
    program(folder, "squeue", NO_CONTROLLER)
    assert queue_now().state("12") is None


def test_words_of_a_job_are_not_its_state(folder):
    lines = ("JobState=CANCELLED Reason=Bad constraints Dependency=(null)",
             "   Command=/a x=1", "   Comment=JobState=FAILED,Reason=none")  # fmt: skip
    program(folder, "squeue", "exit 0")
    program(folder, "scontrol", f"echo '{chr(10).join(lines)}'")
    assert queue_now("12").state("12") == SlurmJobState("CANCELLED", "Bad constraints", "/a x=1")


def test_job_is_not_lost_by_an_error_of_another_kind(tmp_path, folder):
    program(folder, "squeue", "exit 0")
    program(folder, "scontrol", "echo 'error: Protocol authentication error' >&2; exit 1")
    assert settled(tmp_path).state == "running"


@pytest.mark.parametrize("name", ["SQUEUE_STATES", "SCANCEL_STATE", "SINFO_PARTITION"])
def test_filters_in_the_environment_of_a_user_do_not_apply(folder, monkeypatch, name):
    monkeypatch.setenv(name, "RUNNING")
    program(folder, "scancel", f"exit ${{{name}:+1}}")
    assert ask_slurm(["scancel", "12"]).status == 0


def test_jobs_in_a_hidden_partition_are_found(tmp_path, folder):
    script = tmp_path / "deploy" / "submitit" / "1.sh"
    program(folder, "squeue", f"[[ \"$*\" != *-a* ]] || echo '7|PENDING|None|{script}'")
    assert jobs_below(tmp_path, queue_now()) == {"deploy": ["7"]}


ENDED = {"COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED", "FAILED", "TIMEOUT"}
ENDED |= {"NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"}
# As https://slurm.schedmd.com/job_state_codes.html lists them.
STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PENDING", "PREEMPTED", "RUNNING", "SUSPENDED", "TIMEOUT", "COMPLETING", "CONFIGURING",
    "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED",
    "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT",
    "STAGE_OUT", "STOPPED", "UPDATE_DB",
)  # fmt: skip


def test_every_state_of_slurm_is_known_and_only_ends_are_ends():
    states = {word: SlurmJobState(word) for word in STATES}
    assert [word for word, each in states.items() if each.state is None] == []
    assert {word for word, each in states.items() if each.has_ended} == ENDED


def test_a_state_of_a_later_slurm_is_named_and_is_no_end(tmp_path, folder):
    script = tmp_path / "convert" / "submitit" / "1.sh"
    assert described(folder, f"FROZEN|Winter|{script}").waits_for.startswith("FROZEN")
    assert settled(tmp_path).state == "running"


def test_job_is_not_lost_while_the_database_of_ended_jobs_is_away(tmp_path, folder):
    program(folder, "sacct", "echo 'sacct: error: Unable to contact database' >&2; exit 1")
    assert settled(tmp_path).state == "running"


def test_an_order_is_given_again_while_the_controller_is_away(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(slurm_state, "_FIRST_PAUSE_S", 0.01)
    program(
        folder, "scancel", f"[ -e {tmp_path}/up ] && exit; touch {tmp_path}/up; {NO_CONTROLLER}"
    )
    assert ask_slurm(["scancel", "12"]).status is None
    (tmp_path / "up").unlink()
    assert ask_slurm(["scancel", "12"], patience_s=5).status == 0


def test_jobs_of_a_folder_are_known_by_their_scripts(tmp_path, folder):
    results = tmp_path / "a b|c"
    lines = [
        f"7|PENDING|None|{results}/deploy/submitit/1.sh",
        f"8|RUNNING|None|{results}/deploy/submitit/2.sh",
        f"9|RUNNING|None|{results}/deploy/own.sh",
        "10|RUNNING|None|/elsewhere/deploy/submitit/1.sh",
        "12|RUNNING|None|(null)",
    ]
    (tmp_path / "lines").write_text("\n".join(lines))
    program(folder, "squeue", f"cat {tmp_path}/lines")
    assert jobs_below(results, queue_now()) == {"deploy": ["7", "8"]}


def test_record_in_a_copied_folder_describes_no_job_of_its_own(tmp_path, folder):
    original = tmp_path / "original" / "convert"
    (original / "submitit").mkdir(parents=True)
    script = original / "submitit" / "1.sh"
    program(folder, "squeue", f"echo '12|RUNNING|None|{script}'")
    found = settled(tmp_path)
    assert found.state == "lost"
    assert str(original) in found.error
    shutil.rmtree(original)  # it was moved, not copied
    assert settled(tmp_path).state == "running"


@pytest.mark.parametrize("script", ["/home/me/train.sh", "(null)"])
def test_job_that_has_the_id_of_an_old_record_is_not_its_job(tmp_path, folder, script):
    program(folder, "squeue", f"echo '12|RUNNING|None|{script}'")
    found = settled(tmp_path)  # so that action=cancel leaves the other job alone
    assert (found.state, script in found.error) == ("lost", True)
