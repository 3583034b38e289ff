"""Records corrected from Slurm, with small scripts in place of Slurm's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher_scripts.launchers.slurm_state import settle, waiting_for
from stages.record import RUNNING, SUBMITTED, JobRecord, write_record

UNKNOWN_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_CONTROLLER = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    found = settle(path)
    assert found is not None
    return found


@pytest.mark.parametrize("answer", [NO_CONTROLLER, None])
def test_nothing_is_concluded_from_a_slurm_that_does_not_answer(
    tmp_path: Path, folder: Path, answer: str | None
) -> None:
    if answer is None:
        (folder / "squeue").unlink()
    else:
        program(folder, "squeue", answer)
    assert settled(tmp_path).state == "running"


def test_job_without_any_record_is_lost(tmp_path: Path) -> None:
    found = settled(tmp_path)
    assert (found.state, found.exit_code) == ("lost", None)
    assert "Slurm no longer knows the job" in found.error


def test_file_of_ended_jobs_is_asked_where_there_is_no_accounting(
    tmp_path: Path, folder: Path
) -> None:
    program(folder, "sacct", 'case "$*" in -c*) echo CANCELLED;; *) exit 1;; esac')
    assert settled(tmp_path).state == "cancelled"


def test_job_whose_predecessor_failed_says_so(tmp_path: Path, folder: Path) -> None:
    program(folder, "squeue", "exit 0")
    program(folder, "scontrol", "echo JobState=CANCELLED Reason=DependencyNeverSatisfied")
    found = settled(tmp_path, SUBMITTED, dependency="afterok:11")
    assert found.error == "never started: its dependency (afterok:11) did not succeed"


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("TIMEOUT", "time_limit"), ("OUT_OF_MEMORY", "mem_gb"), ("NODE_FAIL", "submit it again")],
)
def test_ends_that_only_slurm_knows_of_come_with_a_remedy(
    tmp_path: Path, folder: Path, word: str, remedy: str
) -> None:
    program(folder, "scontrol", f"echo JobState={word} Reason=None ExitCode=3:0")
    found = settled(tmp_path, started_at="2024-01-01T00:00:00+00:00")
    assert found.state == "failed"
    assert f"{word} with exit code 3:0" in found.error
    assert remedy in found.error


def test_success_counts_only_with_the_word_of_the_job(tmp_path: Path, folder: Path) -> None:
    program(folder, "scontrol", "echo JobState=COMPLETED Reason=None")
    assert settled(tmp_path).state == "lost"
    assert settled(tmp_path, ended_at="2024-01-01T00:00:00+00:00").state == "completed"


def test_queued_job_shows_its_reason_to_wait(folder: Path) -> None:
    program(folder, "squeue", "echo JobState=PENDING Reason=Resources")
    assert waiting_for("12") == "Resources"
    program(folder, "squeue", "echo JobState=RUNNING Reason=None")
    assert waiting_for("12") == ""


def test_words_of_a_job_are_not_its_state(folder: Path) -> None:
    answer = "JobState=PENDING Reason=Priority Command=/x Comment=JobState=FAILED,Reason=none"
    program(folder, "squeue", f"echo {answer}")
    assert waiting_for("12") == "Priority"
