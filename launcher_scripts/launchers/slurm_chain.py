"""The chain of jobs of a server that outlives their time limit (`deploy.uptime`).

Each job keeps its successor in Slurm's queue, which starts it some minutes after this job, or once
this job has ended for whatever reason: a lost node starts it at once. The job that has published
its address serves, and `job.json` is its record; its predecessor sees that address and drains.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from launcher_scripts.launchers.base import AFTER_END, AFTER_START, Job, Launcher, SubmissionError
from launcher_scripts.launchers.slurm_script import log_path
from launcher_scripts.launchers.slurm_state import cancel, queue_now
from stages import record
from stages.base import Summary
from stages.deploy import DeployStage
from stages.endpoint import published_by
from stages.job_process import job_id_here, log_line, node_name
from stages.progress import DamagedFileError
from stages.service import NOT_NEEDED

_POLL_S = 0.5
_ASK_S = 20.0  # between questions to Slurm about a successor
_REFUSED_S = 60.0  # before it is submitted again
_STARTS = 3  # of a job that have room before the end of its predecessor
_LONGEST_PAUSE_S = 300.0  # before a further attempt
_ORDER_S = 20.0  # for which an order is repeated; the job must be able to end meanwhile
_LATE_S = 300.0  # beyond deploy.ready_timeout_s: a node may fetch its container first
# Fields that the records of all jobs of a chain have in common.
_SHARED = ("stage", "name", "cluster", "submitted_at", "git_revision", "outputs")


def serve_in_chain(
    launcher: Launcher, job: Job, serve: Callable[[], Summary], stopped: threading.Event
) -> Summary:
    """Serve, with a successor in the queue; cancel that if the whole chain is to end.

    Args:
        launcher: Submits the successor.
        job: This one.
        serve: Runs the stage.
        stopped: Is set by a signal that ends the job.
    """
    keeper = _Keeper(launcher, job, stopped)
    keeper.thread.start()
    try:
        summary = serve()
        if summary["ended"] == NOT_NEEDED:
            stopped.set()
        return summary  # a server that cannot be started again here may start elsewhere
    except (KeyboardInterrupt, SystemExit):  # cancelled
        stopped.set()
        raise
    finally:
        keeper.finished.set()
        keeper.thread.join()


class _Keeper:
    """Watches one job's place in the chain, in a thread: the job itself serves."""

    def __init__(self, launcher: Launcher, job: Job, stopped: threading.Event) -> None:
        stage = job.stage
        assert isinstance(stage, DeployStage)
        self.thread = threading.Thread(target=self._run, name="chain", daemon=True)
        self.finished = threading.Event()
        self._launcher, self._job, self._stage = launcher, job, stage
        self._id = job_id_here()
        self._stopped = stopped
        self._began, self._started_at = time.time(), record.now()
        self._ends_at = stage.ends_at or self._began + (stage.config.uptime_s or 0)
        self._successor = ""

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:  # the server goes on without a successor
            log_line(f"chain: no further job will follow this one: {error!r}")
        if self._stopped.is_set() and self._successor and not self._serves(self._successor):
            log_line(f"chain: the chain ends: cancelling its next job {self._successor}")
            cancel(self._successor, patience_s=_ORDER_S)

    def _keep(self) -> None:
        if not self._waits(lambda: self._serves(self._id)):
            return
        self._claim_record()
        started_s = time.time() - self._began  # the next job needs about as long
        alone_s = min(self._stage.alone_s, self._stage.serving_s - _STARTS * started_s)
        if self._began + self._stage.serving_s >= self._ends_at:
            return  # the last of the chain
        delay = f"+{alone_s // 60:.0f}" if alone_s >= 60 else ""  # Slurm refuses +0
        after = f"{AFTER_END}:{self._id}?{AFTER_START}:{self._id}{delay}"  # one of both
        config, pause_s = self._stage.config, self._stage.config.restart_backoff_s
        for left in range(config.max_restarts, -1, -1):
            while not self._submit(after):
                if not self._waits(until=time.time() + _REFUSED_S):
                    return
            if not (problem := self._watch()):
                return
            log_line(f"chain: the next job, {self._successor}, {problem}; {left} attempts are left")
            if not self._waits(until=time.time() + pause_s):
                return
            after = ""
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _submit(self, after: str) -> bool:
        """Put a successor into the queue; return False if Slurm refuses it now."""
        job = self._job
        stage = replace(self._stage, predecessor=self._id, ends_at=self._ends_at)
        try:
            following = replace(job, stage=stage)
            self._successor = self._launcher.submit(following, after, patience_s=_ORDER_S).job_id
        except SubmissionError as error:  # such as a limit of queued jobs
            log_line(
                f"chain: the next job was refused, and is submitted again in a minute: {error}"
            )
            return False
        log_line(f"chain: job {self._successor} will follow this one")
        record.update_record(job.record_path, self._id, successor=self._successor)
        return True

    def _watch(self) -> str:
        """Wait for the successor to serve; return why it never will, empty at the end."""
        runs_since = 0.0
        ready_s = self._stage.config.ready_timeout_s + _LATE_S
        while self._waits(lambda: self._serves(self._successor), until=time.time() + _ASK_S):
            if self._serves(self._successor):
                log_line(f"chain: job {self._successor} serves from now on")
                return ""
            answer = queue_now(self._successor).state(self._successor)
            if answer is None:
                continue
            if answer.has_ended:
                return f"has ended before it served (Slurm: {answer.word})"
            if answer.state == record.RUNNING:
                runs_since = runs_since or time.time()
                if time.time() - runs_since > ready_s:
                    cancel(self._successor, patience_s=_ORDER_S)
                    return f"has run for {ready_s:g} s and does not serve"
        return ""

    def _waits(
        self, condition: Callable[[], bool] = lambda: False, *, until: float = float("inf")
    ) -> bool:
        """Wait for a condition or a time; return False if the job ends first."""
        while not condition() and time.time() < until:
            if self._stopped.wait(_POLL_S) or self.finished.is_set():
                return False
        return True

    def _serves(self, job_id: str) -> bool:
        return published_by(self._stage.readiness_path()) == job_id

    def _claim_record(self) -> None:
        """Make `job.json` the record of this job, unless it is already."""
        path = self._job.record_path
        found = None
        with contextlib.suppress(DamagedFileError):
            found = record.read_record(path)
        if found is None or found.job_id == self._id:
            return
        claimed = record.JobRecord(
            **{name: getattr(found, name) for name in _SHARED},
            job_id=self._id,
            state=record.READY,
            host=node_name(),
            log=str(log_path(self._job, self._id)),
            started_at=self._started_at,
            predecessor=self._stage.predecessor,
        )
        record.write_record(path, claimed)
