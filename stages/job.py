"""The submitted job: it runs a stage and keeps the record of the run."""

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
    cause_of,
    end_processes_of_job,
    end_with_owner,
    has_lost_owner,
    job_id_here,
    log_line,
    node_name,
    restrict_umask,
    use_utc_log_times,
)
from stages.step import JobStep, run_in_step

# A live job holds this lock in its folder, which commands on other machines can see.
LOCK_NAME = ".alive-{job}.lock"
LOG_LEVEL_VARIABLE = "NEMO_LAUNCHER_LOG_LEVEL"
_ORPHANED = "stopped because its command ended"
# Errors whose message is enough; others are logged with a traceback.
_SELF_EXPLANATORY = (StageError, CheckpointMismatchError, ServerStartError)


@dataclass(frozen=True)
class StageJob(Checkpointable):
    """Runs a stage and keeps its record up to date; all state is on disk.

    Attributes:
        cluster: kind of cluster, for the record.
        step: how to run the stage in separate processes; None to run it in this one.
        wrapper: runs the stage and meanwhile handles other jobs, such as the successor of a server
            in a chain. Its event is set by a signal that ends the job.
    """

    stage: Stage
    record_path: Path
    cluster: str
    step: JobStep | None = None
    wrapper: Callable[[Callable[[], Summary], threading.Event], Summary] | None = None

    def __call__(self) -> Summary:
        """Run the stage.

        Raises:
            StageError: the job was asked to stop, or the stage failed.
        """
        started = time.monotonic()
        restrict_umask()
        use_utc_log_times()
        if has_lost_owner():  # by now the record may be another command's
            sys.excepthook = _print_cause
            raise StageError(_ORPHANED)
        logging.basicConfig(
            level=os.environ.get(LOG_LEVEL_VARIABLE, "INFO").upper(),
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            datefmt=LOG_TIME,
        )
        logging.getLogger("submitit").propagate = False  # it has its own handler
        self._update_record(
            state=record.RUNNING, started_at=record.now(), ended_at="", host=node_name(), error=""
        )
        try:
            with stop_signals(*STOP_SIGNALS) as stopped, self._lock():
                end_with_owner()
                summary = self.wrapper(self._run, stopped) if self.wrapper else self._run()
        except KeyboardInterrupt as error:
            stop = StageError(_ORPHANED if has_lost_owner() else "stopped by a signal")
            self._record_end(started, record.CANCELLED, stop, stopped=True)
            end_processes_of_job()
            sys.excepthook = _print_cause
            raise stop from error
        except UncompletedJobError as error:
            limit = self.stage.job.resources.time_limit
            late = StageError(f"the time limit of {limit} has passed ({error})")
            self._record_end(started, record.FAILED, late)
            raise
        except Exception as error:  # any error is recorded
            self._record_end(started, record.FAILED, error)
            if isinstance(error, _SELF_EXPLANATORY):
                sys.excepthook = _print_cause
            raise
        self._record_end(started, record.COMPLETED, summary=summary, stopped=stopped.is_set())
        return summary

    @contextmanager
    def _lock(self) -> Iterator[None]:
        path = self.record_path.with_name(LOCK_NAME.format(job=job_id_here()))
        with ExitStack() as held:
            with suppress(ValueError, OSError):  # a full disk must not end the job
                held.enter_context(folder_lock(path, "the job runs already"))
            yield

    def _run(self) -> Summary:
        if self.step is None:
            return self.stage()
        folder = self.record_path.parent / "submitit" / f"step-{job_id_here()}"
        return run_in_step(self.stage, self.step, folder=folder)

    def _record_end(
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
            # The signal may mean a cancellation or a requeue; only Slurm knows.
            state = record.RUNNING
        self._update_record(
            state=state,
            ended_at=record.now(),
            seconds=round(time.monotonic() - started, 2),
            exit_code={record.COMPLETED: 0, record.RUNNING: None}.get(state, details.exit_code),
            error=cause_of(error, folder=self.record_path.parent) if error else "",
            summary=summary or details.summary,
        )

    def _update_record(self, **changes: Any) -> None:
        job_id = os.environ.get(JOB_ID_VARIABLE, "")
        updated = record.update_record(self.record_path, job_id, **changes)
        if updated is None and not self.record_path.exists():  # a user has deleted it
            stage = self.stage
            fresh = record.JobRecord(
                job_id, stage.name, stage.job.name, record.RUNNING, self.cluster
            )
            record.write_record(self.record_path, replace(fresh, **changes))


def _print_cause(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exception hook: log only the message, which is written for users, without a traceback."""
    del kind, trace
    log_line(cause_of(error))
