"""Stages that cost nothing, for tests of everything around a stage."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stages.base import JobSettings, Resources, Stage, StageError, Summary
from stages.deploy import JOB_ID_VARIABLE
from stages.progress import Progress, write_json


class WriteStage(Stage):
    """Writes a file; its name tells how it behaves."""

    name = "write"

    def __init__(self, job: JobSettings, text: str = "hello", fails: str = "") -> None:
        super().__init__(job)
        self.text = text
        self.fails = fails

    @property
    def target(self) -> Path:
        return self.job.folder.parent / "out" / "target.txt"

    def check(self) -> list[str]:
        return []

    def outputs(self) -> list[Path]:
        return [self.target]

    def identity(self) -> dict[str, Any]:
        return {"toy.text": self.text}

    def marker_path(self) -> Path:
        return self.target.with_suffix(".json")

    def run(self, progress: Progress) -> Summary:
        sys.stdout.write("working\n")
        progress.update("writing", done=1, total=2, unit="lines")
        if self.fails == "error":
            raise StageError("the disk is on fire; use water")
        if self.fails == "killed":
            os.kill(os.getpid(), 9)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(self.text)
        return {"metrics": {"lines": 1.0}}


class EnvironmentStage(WriteStage):
    """Writes its environment."""

    name = "environment"

    def run(self, progress: Progress) -> Summary:
        del progress
        write_json(self.target, dict(os.environ))
        return {}


class SleepStage(WriteStage):
    """Starts a child that would outlive it, and sleeps."""

    name = "sleep"

    def run(self, progress: Progress) -> Summary:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
        )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.with_suffix(".pid").write_text(str(child.pid))
        progress.update("sleeping")
        time.sleep(300)
        return {}


class TwiceStage(WriteStage):
    """Sleeps the first time it runs, and ends the second time."""

    name = "twice"

    @property
    def first_path(self) -> Path:
        return self.target.with_suffix(".first")

    def run(self, progress: Progress) -> Summary:
        del progress
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if not self.first_path.exists():
            self.first_path.touch()
            time.sleep(300)
        self.target.write_text("second")
        return {}


class ServeStage(WriteStage):
    """Is ready at once and does not end by itself."""

    name = "serve"

    def marker_path(self) -> None:  # type: ignore[override]
        return None

    def outputs(self) -> list[Path]:
        return []

    def readiness_path(self) -> Path:
        return self.job.folder / "endpoint.json"

    def run(self, progress: Progress) -> Summary:
        del progress
        write_json(self.readiness_path(), {"job_id": os.environ[JOB_ID_VARIABLE]})
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            return {"ended": "stopped"}
        finally:
            self.readiness_path().unlink()
        return {}


def settings(tmp_path: Path, name: str, **changes: Any) -> JobSettings:
    return JobSettings(name=name, folder=tmp_path / name, resources=Resources(), **changes)
