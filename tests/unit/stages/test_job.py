"""The job of a stage: whose record it may write."""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.base import StageError
from stages.job import StageJob
from stages.job_process import OWNER_VARIABLE
from stages.record import JobRecord, read_record, write_record


def test_a_job_without_its_command_leaves_the_record_alone(tmp_path, monkeypatch):
    """The next command may have announced a job of its own there."""
    announced = JobRecord("", "convert", "convert", "submitted")
    write_record(tmp_path / "job.json", announced)
    monkeypatch.setenv(OWNER_VARIABLE, "-1")  # the id of no process
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("stages.job.use_utc_log_times", lambda: None)
    stage = cast(Any, SimpleNamespace(name="convert"))
    with pytest.raises(StageError, match="stopped because its command ended"):
        StageJob(stage, tmp_path / "job.json", "local")()
    assert read_record(tmp_path / "job.json") == announced
