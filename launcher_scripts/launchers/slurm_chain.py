"""A chain of jobs for a server that outlives the time limit of one job (`deploy.uptime`).

Each job keeps its successor in Slurm's queue. Slurm starts the successor some minutes after the
job, or as soon as the job has ended for any reason, such as a lost node. The job that has last
published its address serves, and `job.json` is its record; its predecessor sees the new address
and drains.
"""

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
from stages.service import NOT_NEEDED

_POLL_S = 0.5
_QUERY_S = 20.0  # interval of queries about a successor
_REFUSED_S = 60.0  # pause before a refused successor is submitted again
_STARTS_BEFORE_END = 3  # a successor starts early enough for so many attempts to load
_LONGEST_PAUSE_S = 300.0  # longest pause before a further successor
_PATIENCE_S = 20.0  # retry time of Slurm commands; short, because the job may have to end
_LATE_S = 300.0  # added to deploy.ready_timeout_s: a node may have to fetch its container
# Fields with the same values in the records of all jobs of a chain.
_SHARED = ("stage", "name", "cluster", "submitted_at", "git_revision", "outputs")


def serve_in_chain(
    launcher: Launcher, job: Job, serve: Callable[[], Summary], stopped: threading.Event
) -> Summary:
    """Serve while keeping a successor in the queue; cancel it if the whole chain is to end.

    Args:
        launcher: Submits the successor.
        job: The job that runs here.
        serve: Runs the stage.
        stopped: Set by a signal that ends the job.
    """
    keeper = _ChainKeeper(launcher, job, stopped)
    keeper.thread.start()
    try:
        summary = serve()
        if summary["ended"] == NOT_NEEDED:
            stopped.set()
        return summary  # the successor keeps going even if the server failed here for good
    except (KeyboardInterrupt, SystemExit):  # cancelled
        stopped.set()
        raise
    finally:
        keeper.finished.set()
        keeper.thread.join()


class _ChainKeeper:
    """Thread that submits and watches a job's successor while the job serves."""

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
            self._keep_successor()
        except Exception as error:  # the server keeps running without a successor
            log_line(f"chain: no further job will follow this one: {error!r}")
        if self._stopped.is_set() and self._successor and not self._serves(self._successor):
            log_line(f"chain: the chain ends: cancelling the next job {self._successor}")
            cancel(self._successor, patience_s=_PATIENCE_S)

    def _keep_successor(self) -> None:
        if not self._wait_until(lambda: self._serves(self._id)):
            return
        self._claim_record()
        started_s = time.time() - self._began  # the next job will take about as long to start
        alone_s = min(self._stage.alone_s, self._stage.serving_s - _STARTS_BEFORE_END * started_s)
        if self._began + self._stage.serving_s >= self._ends_at:
            return  # the last of the chain
        delay = f"+{alone_s // 60:.0f}" if alone_s >= 60 else ""  # Slurm refuses +0
        after = f"{AFTER_END}:{self._id}?{AFTER_START}:{self._id}{delay}"  # whichever comes first
        config, pause_s = self._stage.config, self._stage.config.restart_backoff_s
        for left in range(config.max_restarts, -1, -1):
            while not self._submit(after):
                if not self._wait_until(until=time.time() + _REFUSED_S):
                    return
            if not (problem := self._watch()):
                return
            log_line(f"chain: the next job, {self._successor}, {problem}; {left} attempts are left")
            if not self._wait_until(until=time.time() + pause_s):
                return
            after = ""
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _submit(self, after: str) -> bool:
        """Submit a successor; return False if Slurm refuses it for now."""
        job = self._job
        stage = replace(self._stage, predecessor=self._id, ends_at=self._ends_at)
        try:
            following = replace(job, stage=stage)
            self._successor = self._launcher.submit(following, after, patience_s=_PATIENCE_S).job_id
        except SubmissionError as error:  # for example a limit of queued jobs
            log_line(f"chain: the next job was refused; trying again in a minute: {error}")
            return False
        log_line(f"chain: job {self._successor} will follow this one")
        record.update_record(job.record_path, self._id, successor=self._successor)
        return True

    def _watch(self) -> str:
        """Wait until the successor serves; return why it never will, or an empty string."""
        runs_since = 0.0
        ready_s = self._stage.config.ready_timeout_s + _LATE_S
        while self._wait_until(lambda: self._serves(self._successor), until=time.time() + _QUERY_S):
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
                    cancel(self._successor, patience_s=_PATIENCE_S)
                    return f"has run for {ready_s:g} s and does not serve"
        return ""

    def _wait_until(
        self, condition: Callable[[], bool] = lambda: False, *, until: float = float("inf")
    ) -> bool:
        """Wait for a condition or the time `until`; return False if the job ends first."""
        while not condition() and time.time() < until:
            if self._stopped.wait(_POLL_S) or self.finished.is_set():
                return False
        return True

    def _serves(self, job_id: str) -> bool:
        return published_by(self._stage.readiness_path()) == job_id

    def _claim_record(self) -> None:
        """Replace `job.json` by the record of this job, unless it already is."""
        path = self._job.record_path
        found = record.readable_record(path)
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
