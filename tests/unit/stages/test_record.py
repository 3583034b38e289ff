"""The record of a job: corrected where it lies, or at least for whoever looks at it."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from stages import progress
from stages.progress import DamagedFileError, write_json
from stages.record import (
    CANCELLED,
    COMPLETED,
    LOST,
    RUNNING,
    JobRecord,
    exchange_record,
    read_record,
    update_record,
    write_record,
)


def test_correction_is_kept(tmp_path):
    path = tmp_path / "job.json"
    found = JobRecord(job_id="7", stage="deploy", name="deploy_x", state=RUNNING)
    write_record(path, found)
    lost = JobRecord(job_id="7", stage="deploy", name="deploy_x", state=LOST)
    assert exchange_record(path, found, lost) == lost
    assert read_record(path) == lost
    path.write_text("{")
    assert exchange_record(path, None, found) == read_record(path) == found


def test_a_correction_never_replaces_what_a_job_has_noted_since(tmp_path):
    path = tmp_path / "job.json"
    found = JobRecord(job_id="7", stage="deploy", name="deploy_x", state=RUNNING)
    done = replace(found, state=COMPLETED)
    write_record(path, done)
    assert exchange_record(path, found, replace(found, state=LOST)) == done
    assert exchange_record(path, None, replace(found, job_id="8")) == done
    assert read_record(path) == done
    path.unlink()
    assert exchange_record(path, found, replace(found, state=LOST)) is None
    assert not path.exists()


def test_record_that_cannot_be_written_is_corrected_for_the_reader(tmp_path):
    path = tmp_path / "job.json"
    found = JobRecord(job_id="7", stage="deploy", name="deploy_x", state=RUNNING)
    write_record(path, found)
    (tmp_path / ".job.json.lock").unlink()
    (tmp_path / ".job.json.lock").mkdir()  # no permission would stop a test that runs as root
    lost = replace(found, state=LOST)
    assert exchange_record(path, found, lost) == lost
    assert read_record(path) == found


@pytest.mark.parametrize("text", ["", "{", "\0\0", "\xff", "{}", "[]", "7", '{"outputs": 3}'])
def test_damaged_record_is_named(tmp_path, text):
    path = tmp_path / "job.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DamagedFileError, match=r"job\.json is damaged \(.+\); restore a copy, or"):
        read_record(path)
    assert update_record(path, "7", state=LOST) is None  # it ends no job


@pytest.mark.parametrize(
    ("key", "value"),
    [("log", 5), ("job_id", None), ("seconds", "x"), ("process", "7"), ("summary", [1])],
)
def test_record_with_a_value_of_another_type_is_named(tmp_path, key, value):
    path = tmp_path / "job.json"
    write_json(path, {"job_id": "7", "stage": "deploy", "name": "d", "state": "x", key: value})
    with pytest.raises(DamagedFileError, match=rf"\({key}: Input .*; expected the record of a job"):
        read_record(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "gone"},
        {"job_id": "--me"},  # an option of scancel
        {"started_at": "yesterday"},
        {"submitted_at": "2026-01-01T00:00:00"},
    ],
)
def test_record_with_what_no_job_has_is_damaged(tmp_path, wrong):
    path = tmp_path / "job.json"
    write_json(path, {"job_id": "7", "stage": "deploy", "name": "d", "state": RUNNING, **wrong})
    with pytest.raises(DamagedFileError, match=next(iter(wrong.values()))):
        read_record(path)


def test_whole_seconds_are_a_time(tmp_path):
    path = tmp_path / "job.json"
    record = JobRecord(job_id="7", stage="deploy", name="d", state=LOST, seconds=5)
    write_record(path, record)
    assert read_record(path) == record


@pytest.mark.timeout(10)
def test_pipe_in_place_of_a_record_keeps_no_reader_waiting(tmp_path):
    path = tmp_path / "job.json"
    os.mkfifo(path)
    with pytest.raises(DamagedFileError, match=r"job\.json is damaged \(it is not a file;"):
        read_record(path)


def test_end_of_a_job_is_recorded_on_a_full_disk(tmp_path, monkeypatch):
    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    path = tmp_path / "job.json"
    write_record(path, JobRecord("7", "deploy", "d", RUNNING, error="a reason that goes"))
    size = path.stat().st_size
    monkeypatch.setattr(progress, "replace_file", full)
    ended = JobRecord("7", "deploy", "d", CANCELLED)
    assert update_record(path, "7", state=CANCELLED, error="") == ended
    assert read_record(path) == ended
    assert path.stat().st_size == size
    assert json.loads(path.read_text())["state"] == CANCELLED
