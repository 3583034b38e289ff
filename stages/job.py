"""What is really submitted: a stage together with the bookkeeping around it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from submitit.core.utils import UncompletedJobError
from submitit.helpers import Checkpointable, DelayedSubmission

from export_scripts.errors import CheckpointMismatchError
from export_scripts.files.disk import full_disk
from inference.launch_environment import LaunchEnvironment, read_launch_environment
from inference.server.server import ServerStartError
from stages import record
from stages.base import Stage, StageError, Summary
from stages.own_job import JOB_ID_VARIABLE, job_id_here, node_name
from stages.step import Step, run_in_step

# The process whose end ends a job that runs in its foreground: "<pid>:<start time in ticks>".
OWNER_VARIABLE = "SLIPWAY_OWNER"
# Every process of a job carries it, so that none can be overlooked at its end.
MARK_VARIABLE = "SLIPWAY_JOB_MARK"
LOG_LEVEL_VARIABLE = "NEMO_LAUNCHER_LOG_LEVEL"
_WATCH_S = 0.5
# Errors whose message says everything; others are logged with their traceback.
_SELF_EXPLANATORY = (StageError, CheckpointMismatchError, ServerStartError)


class StopRequested(KeyboardInterrupt):
    """A signal asks the job to end; raised in the main thread, so that everything unwinds."""


@dataclass(frozen=True)
class StageJob(Checkpointable):
    """Runs a stage and keeps its record up to date.

    Attributes:
        step: how to run the stage in a process of its own; None to run it right here.
    """

    stage: Stage
    record_path: Path
    step: Step | None = None

    def __call__(self) -> Summary:
        """Run the stage.

        Raises:
            StageError: the job was asked to stop, or the stage says why it failed.
        """
        place = own_place()
        if place.rank > 0:
            return assist(self.stage, place)
        started = time.monotonic()
        logging.basicConfig(
            level=os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        logging.getLogger("submitit").propagate = False  # it writes its own lines
        self._note(
            state=record.RUNNING, started_at=record.now(), ended_at="", host=node_name(), error=""
        )
        try:
            with stop_signals() as stopped, _watching_owner():
                summary = self._run()
        except KeyboardInterrupt as error:
            self._note_end(started, record.CANCELLED, error="stopped by a signal", stopped=True)
            # Those above wait for this one, and end by themselves.
            end_processes_of_job(spare=[os.getpid(), *_ancestors(os.getpid())])
            sys.excepthook = _print_cause
            raise StageError("stopped by a signal") from error
        except UncompletedJobError as error:
            limit_min = self.stage.resources().time_limit_min
            text = f"the time limit of {limit_min} minutes has passed ({error})"
            self._note_end(started, record.FAILED, error=text)
            raise
        except Exception as error:  # whatever it is, it is noted in the record
            self._note_end(started, record.FAILED, error=cause_of(error), cause=error)
            if isinstance(error, _SELF_EXPLANATORY):
                sys.excepthook = _print_cause
            raise
        self._note_end(started, record.COMPLETED, summary=summary, stopped=stopped.is_set())
        return summary

    def _run(self) -> Summary:
        if self.step is None:
            return self.stage()
        folder = self.record_path.parent / "submitit" / f"step-{job_id_here()}"
        return run_in_step(self.stage, self.step, folder=folder)

    def checkpoint(self) -> DelayedSubmission:
        """Return the same job: all progress is on disk."""
        return DelayedSubmission(self)

    def _note_end(
        self,
        started: float,
        state: str,
        *,
        error: str = "",
        cause: BaseException | None = None,
        summary: Summary | None = None,
        stopped: bool = False,
    ) -> None:
        told = cause if isinstance(cause, StageError) else StageError("")
        if stopped and os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            # The signal may announce a cancellation or a requeue; only Slurm knows.
            state = record.RUNNING
        self._note(
            state=state,
            ended_at=record.now(),
            seconds=round(time.monotonic() - started, 2),
            exit_code={record.COMPLETED: 0, record.RUNNING: None}.get(state, told.exit_code),
            error=error,
            summary=summary or told.summary,
        )

    def _note(self, **changes: object) -> None:
        record.update_record(self.record_path, os.environ.get(JOB_ID_VARIABLE, ""), **changes)


def own_place() -> LaunchEnvironment:
    """Return the place of this process where every task of a job runs this: under bcprun."""
    is_task = os.environ.get("SUBMITIT_EXECUTOR") == "bcp"
    return read_launch_environment(os.environ) if is_task else LaunchEnvironment()


def assist(stage: Stage, place: LaunchEnvironment) -> Summary:
    """Do the part of a rank beside the first; only the first keeps records and writes results."""
    with stop_signals(), contextlib.suppress(StopRequested):
        stage.assist(place)
    return {}


def cause_of(error: BaseException) -> str:
    """Return an error in words: the message alone when it was written for users."""
    text = str(error).strip()
    if isinstance(error, OSError) and (full := full_disk(error, Path.cwd())):
        return full
    if isinstance(error, (ValueError, StageError, RuntimeError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_processes_of_job(mark: str | None = None, *, spare: Sequence[int] = ()) -> None:
    """Kill what a job has started and left behind, wherever it is in the process tree.

    Args:
        mark: the value of MARK_VARIABLE; this process's own by default.
        spare: processes to leave alone.
    """
    value = mark or os.environ.get(MARK_VARIABLE)
    if not value:
        return
    wanted = f"{MARK_VARIABLE}={value}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may be gone by now, or be somebody else's.
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                pid = int(entry.name)
                if pid not in spare:
                    os.kill(pid, signal.SIGKILL)


def _print_cause(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End the log of a job with the reason alone: it was written for users."""
    del kind, trace
    sys.stderr.write(f"{cause_of(error)}\n")


def owner_of_this_process() -> str:
    """Return the value of OWNER_VARIABLE that names this process."""
    return f"{os.getpid()}:{_start_ticks(os.getpid())}"


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Turn the polite signals into StopRequested; later ones do not disturb the unwinding.

    The event tells afterwards whether one came.
    """
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    chosen = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        for each in chosen:
            signal.signal(each, signal.SIG_IGN)
        came.set()
        raise StopRequested(signal.Signals(signum).name)

    previous = {each: signal.signal(each, stop) for each in chosen}
    try:
        yield came
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def _watching_owner() -> Iterator[None]:
    """End this job when the process that it runs in the foreground of is gone."""
    owner = os.environ.get(OWNER_VARIABLE)
    if not owner:
        yield
        return
    pid, _, ticks = owner.partition(":")
    parent = os.getppid()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_S):
            if _start_ticks(int(pid)) != ticks or os.getppid() != parent:
                sys.stderr.write("the command that started this job is gone; stopping\n")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="owner-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _start_ticks(pid: int) -> str:
    """Return when a process started, so that a recycled id is not mistaken for it."""
    values = _stat(pid)
    return values[19] if values and values[0] != "Z" else ""


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the process that started this one, the one that started that, and so on."""
    while (values := _stat(pid)) and (pid := int(values[1])) > 1:
        yield pid


def _stat(pid: int) -> list[str]:
    """Return what the kernel tells of a process, from its state on; empty when it is gone.

    Next come the parent and, 18 further on, the start time.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command in parentheses may hold spaces
