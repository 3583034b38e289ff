"""Stages that cost nothing, for tests of everything around a stage."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from inference.system.launch_environment import LaunchEnvironment
from stages.base import JobSettings, Resources, Stage, StageError, Summary
from stages.convert import ConvertStage
from stages.endpoint import ServerEndpoint
from stages.job_process import JOB_ID_VARIABLE
from stages.progress import Progress, write_json
from stages.record import now


class WriteStage(Stage):
    """Writes a file; its name selects its behaviour."""

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
        silent = subprocess.DEVNULL  # else a step would wait for the end of its output
        child = subprocess.Popen(
            ["sleep", "300"], start_new_session=True, stdout=silent, stderr=silent
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


class StuckStage(ConvertStage):
    """Converts, and gets stuck once after each quarter of it but the last."""

    def stuck_path(self, quarter: int) -> Path:
        return self.job.folder / f"stuck-{quarter}"

    def run(self, progress: Progress) -> Summary:
        return super().run(_StuckProgress(progress.path, self))


class _StuckProgress(Progress):
    def __init__(self, path: Path | None, stage: StuckStage) -> None:
        super().__init__(path)
        self._stage = stage

    def update(self, phase: str, done: float = 0, total: float = 0, *, unit: str = "items") -> None:
        super().update(phase, done, total, unit=unit)
        for quarter in (1, 2, 3):
            path = self._stage.stuck_path(quarter)
            if 4 * done >= quarter * total > 0 and not path.exists():
                path.touch()
                time.sleep(300)


class StubbornStage(SleepStage):
    """Only notes that it was asked to end."""

    name = "stubborn"

    @property
    def asked_path(self) -> Path:
        return self.target.with_suffix(".asked")

    def run(self, progress: Progress) -> Summary:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, lambda *_: self.asked_path.touch())
        return super().run(progress)


class ServeStage(WriteStage):
    """Is ready at once and ends only when it is stopped."""

    name = "serve"

    def marker_path(self) -> None:  # type: ignore[override]
        return None

    def outputs(self) -> list[Path]:
        return []

    def readiness_path(self) -> Path:
        return self.job.folder / "endpoint.json"

    def run(self, progress: Progress) -> Summary:
        del progress
        job_id = os.environ[JOB_ID_VARIABLE]
        address = ServerEndpoint("127.0.0.1", 8, 9, 10, "gpt", None, job_id, 1, 1, now())
        address.publish(self.readiness_path())
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            return {"ended": "stopped"}
        finally:
            self.readiness_path().unlink()
        return {}


class RanksStage(WriteStage):
    """Every rank leaves a note of what it did and where."""

    name = "ranks"

    def run(self, progress: Progress) -> Summary:
        del progress
        self._note(0, "run")
        if self.fails:
            time.sleep(300)
        return {}

    def assist(self, place: LaunchEnvironment) -> None:
        if self.fails == f"rank {place.rank}":
            sys.stdout.write("looking for the network\n")
            raise StageError("no network here")
        self._note(place.rank, "assist")

    def outputs(self) -> list[Path]:
        return [self.target.parent / "rank-0"]

    def _note(self, rank: int, did: str) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        note = {
            "did": did,
            "node": os.environ.get("GROUP_RANK", os.environ.get("SLURMD_NODENAME")),
            "note": os.environ.get("NOTE"),
            "secret": len(os.environ.get("HF_TOKEN", "")),
            "image": os.environ.get("PYXIS_STUB_CONTAINER_IMAGE"),
        }
        write_json(self.target.parent / f"rank-{rank}", note)


def settings(tmp_path: Path, name: str, **changes: Any) -> JobSettings:
    changes.setdefault("resources", Resources())
    return JobSettings(name=name, folder=tmp_path / name, **changes)
