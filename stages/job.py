"""The job that is submitted: a stage and the record of its run."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from submitit.core.utils import UncompletedJobError
from submitit.helpers import Checkpointable

from foundations.errors import CheckpointMismatchError
from foundations.files.lock import folder_lock
from inference.server.log import ServerStartError
from inference.system.parent_process import stop_signals
from stages import record
from stages.base import Stage, StageError, Summary
from stages.job_process import (
    JOB_ID_VARIABLE,
    LOG_TIME,
    STOP_SIGNALS,
    begin_log,
    cause_of,
    close_to_others,
    end_processes_of_job,
    end_with_owner,
    has_lost_owner,
    job_id_here,
    log_line,
    node_name,
)
from stages.step import JobStep, run_in_step

# A job holds it, in its folder, for as long as it lives: commands on other machines can see that.
LOCK_NAME = ".alive-{job}.lock"
LOG_LEVEL_VARIABLE = "NEMO_LAUNCHER_LOG_LEVEL"
_ORPHANED = "stopped by the end of its command"
# Errors whose message says everything; others are logged with their traceback.
_SELF_EXPLANATORY = (StageError, CheckpointMismatchError, ServerStartError)


@dataclass(frozen=True)
class StageJob(Checkpointable):
    """Runs a stage and keeps its record up to date; all progress is on disk.

    Attributes:
        cluster: kind of the cluster, for the record.
        step: how to run the stage in a process of its own; None to run it right here.
        around: runs the stage and looks after other jobs meanwhile, such as the successor of a
            server that outlives its time limit; the event is set by a signal that ends the job.
    """

    stage: Stage
    record_path: Path
    cluster: str
    step: JobStep | None = None
    around: Callable[[Callable[[], Summary], threading.Event], Summary] | None = None

    def __call__(self) -> Summary:
        """Run the stage.

        Raises:
            StageError: the job was asked to stop, or the stage says why it failed.
        """
        started = time.monotonic()
        close_to_others()
        begin_log()
        if has_lost_owner():  # the record may be another command's by now
            sys.excepthook = _print_cause
            raise StageError(_ORPHANED)
        logging.basicConfig(
            level=os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            datefmt=LOG_TIME,
        )
        logging.getLogger("submitit").propagate = False  # it writes its own lines
        self._note(
            state=record.RUNNING, started_at=record.now(), ended_at="", host=node_name(), error=""
        )
        try:
            with stop_signals(*STOP_SIGNALS) as stopped, self._lock():
                end_with_owner()
                summary = self.around(self._run, stopped) if self.around else self._run()
        except KeyboardInterrupt as error:
            stop = StageError(_ORPHANED if has_lost_owner() else "stopped by a signal")
            self._note_end(started, record.CANCELLED, stop, stopped=True)
            end_processes_of_job()
            sys.excepthook = _print_cause
            raise stop from error
        except UncompletedJobError as error:
            limit = self.stage.job.resources.time_limit
            late = StageError(f"the time limit of {limit} has passed ({error})")
            self._note_end(started, record.FAILED, late)
            raise
        except Exception as error:  # whatever it is, it is noted in the record
            self._note_end(started, record.FAILED, error)
            if isinstance(error, _SELF_EXPLANATORY):
                sys.excepthook = _print_cause
            raise
        self._note_end(started, record.COMPLETED, summary=summary, stopped=stopped.is_set())
        return summary

    @contextmanager
    def _lock(self) -> Iterator[None]:
        path = self.record_path.with_name(LOCK_NAME.format(job=job_id_here()))
        with ExitStack() as held:
            with suppress(ValueError, OSError):  # a full disk ends no job
                held.enter_context(folder_lock(path, "the job runs already"))
            yield

    def _run(self) -> Summary:
        if self.step is None:
            return self.stage()
        folder = self.record_path.parent / "submitit" / f"step-{job_id_here()}"
        return run_in_step(self.stage, self.step, folder=folder)

    def _note_end(
        self,
        started: float,
        state: str,
        error: Exception | None = None,
        *,
        summary: Summary | None = None,
        stopped: bool = False,
    ) -> None:
        details = error if isinstance(error, StageError) else StageError("")
        if stopped and self.cluster == "bcm":
            # The signal may announce a cancellation or a requeue; only Slurm knows.
            state = record.RUNNING
        self._note(
            state=state,
            ended_at=record.now(),
            seconds=round(time.monotonic() - started, 2),
            exit_code={record.COMPLETED: 0, record.RUNNING: None}.get(state, details.exit_code),
            error=cause_of(error, folder=self.record_path.parent) if error else "",
            summary=summary or details.summary,
        )

    def _note(self, **changes: Any) -> None:
        job_id = os.environ.get(JOB_ID_VARIABLE, "")
        noted = record.update_record(self.record_path, job_id, **changes)
        if noted is None and not self.record_path.exists():  # a user has deleted it
            stage = self.stage
            fresh = record.JobRecord(
                job_id, stage.name, stage.job.name, record.RUNNING, self.cluster
            )
            record.write_record(self.record_path, replace(fresh, **changes))


def _print_cause(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End the log of a job with the reason alone: it was written for users."""
    del kind, trace
    log_line(cause_of(error))
