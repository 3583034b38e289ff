"""Submission of the planned jobs, and following them to their end."""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foundations.time_limit import slurm_notation
from inference.server.log import last_lines
from inference.system.parent_process import uninterrupted
from launcher_scripts import job_folder
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import (
    CHECKOUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PROGRAM,
)
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import (
    Job,
    JobHandle,
    Launcher,
    SubmissionError,
    dependency,
)
from launcher_scripts.pipeline import PlannedStage
from stages import record
from stages.base import Marker, Stage, Summary
from stages.endpoint import published_by
from stages.job_process import STOP_SIGNALS
from stages.progress import DamagedFileError, ProgressState, read_progress

_POLL_S = 0.1
_STOPPING = "stopping; Ctrl-C again ends the jobs at once"
_CANCELLING = "cancelling the jobs that were submitted"
# A dry run makes up job ids, so that its output shows the chain of dependencies.
_FIRST_DRY_ID = 10001


@dataclass
class Run:
    """One pass through the pipeline.

    Attributes:
        planned: every stage, including those that do not run.
        jobs: the jobs of the stages that run, by stage name.
        words: the command line.
        before: the earlier jobs in the results folder, by stage name.
        handles: the submitted jobs, by stage name.
        name: name of this run among several of one command; empty for a single run.
        status: exit status; None until the run has ended.
    """

    launcher: Launcher
    console: Console
    planned: Sequence[PlannedStage]
    jobs: dict[str, Job]
    words: Sequence[str] = ()
    before: Mapping[str, record.JobRecord] = field(default_factory=dict)
    handles: dict[str, JobHandle] = field(default_factory=dict)
    name: str = ""
    status: int | None = None
    _done: set[str] = field(default_factory=set, init=False)  # stages that have ended or are ready
    _stage_started: float = field(default_factory=time.monotonic, init=False)  # of the current one

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.launcher.config

    @property
    def only_renders(self) -> bool:
        """Whether only the jobs' files are written and nothing is started."""
        return self.config.is_dry_run or self.launcher.only_renders

    def begin(self) -> None:
        """Record the command line in the results folder."""
        results = self.config.results_dir
        if self.jobs:
            arguments = [sys.executable, str(CHECKOUT / "main.py"), *self.words]
            job_folder.record_command(results, arguments, at=record.now())

    def render(self) -> None:
        """Write and print every job's script and configuration; start nothing."""
        after, rows = "", []
        earlier = []
        for number, (name, job) in enumerate(self.jobs.items()):
            job_id = str(_FIRST_DRY_ID + number)
            wanted = job.stage.job.resources
            gpus = "-" if wanted.gpus_per_node is None else str(wanted.gpus_per_node * wanted.nodes)
            time_limit = slurm_notation(wanted.time_limit_min)
            rows.append((f"{name} ({job_id})", str(wanted.nodes), gpus, time_limit, after or "-"))
            written = job_folder.write_job_files(job, self.launcher, after)
            for path in written[bool(rows[1:]) :]:  # all share one configuration: print it once
                self.console.say(f"# {path}\n{path.read_text(encoding='utf-8')}")
            if self.launcher.only_renders:
                self.console.say(f"to start it: kubectl apply -f {shlex.quote(str(written[-1]))}")
            earlier.append((job, job_id))
            after = dependency(earlier)
        if self.launcher.only_renders:
            return
        if not self.jobs:
            self.console.say("dry run: nothing to do; overwrite=true runs finished stages again")
            return
        header = ("job", "nodes", "GPUs", "time", "depends on")
        self.console.say(self.console.table(header, rows))
        count = "one job" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs"
        self.console.say(f"\ndry run: {count} written, nothing started")

    def run_all(self, *, wait: bool) -> int:
        """Start every job and return the exit status.

        In the foreground, jobs run one after another and end with this command; a server is stopped
        after the last stage. Queued jobs outlive the command, which follows them only with `wait`.
        """
        if not self.launcher.in_foreground:
            status = self.submit_all()
            if status != EXIT_OK or not wait:
                self.console.say(self.summary())
                if status == EXIT_OK and self.jobs:
                    self.console.say(f"\n{self._hint()}")
                return status
        notice = ""
        try:
            status = self._follow_all()
        except KeyboardInterrupt:
            status, notice = self._interrupted(), _STOPPING
        except SubmissionError as error:
            status = self._report_refusal(error)
        finally:
            if self.launcher.in_foreground:
                self.stop_all(notice)
        self.console.say(self.summary())
        return status

    def submit_all(self) -> int:
        """Queue all jobs, or none if one is refused; return the exit status.

        Jobs that were already submitted are not submitted again.
        """
        try:
            for name in self.jobs:
                if name not in self.handles:
                    self.submit(name)
        except BaseException as error:  # including Ctrl-C and a full disk
            self.stop_all(_CANCELLING)
            if isinstance(error, SubmissionError):
                return self._report_refusal(error)
            raise
        return EXIT_OK

    def _hint(self) -> str:
        folder = self.config.results_dir
        command = shlex.join([*PROGRAM.split(), "action=status", f"run_dir={folder}"])
        return f"the jobs are queued; follow them with {command}, or use action=logs or cancel"

    def _report_refusal(self, error: SubmissionError) -> int:
        self.console.say(f"a job was refused: {error}")
        return EXIT_FAILED

    def advance(self, *, shows: bool = False) -> int | None:
        """Start the next job once the one before it has ended, or is a server and ready.

        Return the exit status once the last job has ended or one has failed; None until then.
        Servers keep running. `shows` prints the progress of the current job.

        Raises:
            SubmissionError: a job was refused.
        """
        for name, job in self.jobs.items():
            if name in self._done:
                continue
            is_last = name == list(self.jobs)[-1]
            handle = self.handles.get(name) or self.submit(name)
            status = self._outcome(handle, until_ready=job.is_server and not is_last)
            if status is None:
                if shows:
                    self._show(handle)
                return None
            self._done.add(name)
            self._stage_started = time.monotonic()
            if status != EXIT_OK:
                self._explain_failures()
                return status
        return EXIT_OK

    def _follow_all(self) -> int:
        while (status := self.advance(shows=True)) is None:
            time.sleep(_POLL_S)
        if status != EXIT_OK:
            self.stop_all()
            return status
        servers = [handle for handle in self.handles.values() if handle.job.is_server]
        keeps_serving = self.config.deploy.keep
        if servers and keeps_serving:
            self.console.say("serving until Ctrl-C or the time limit")
        if keeps_serving or not self.launcher.in_foreground:
            return max(map(self._follow, servers), default=EXIT_OK)
        return EXIT_OK

    def _interrupted(self) -> int:
        if not self.launcher.in_foreground:
            self.console.say(self._hint())
            return EXIT_INTERRUPTED
        # Ctrl-C is the normal way to end a server that is the last stage.
        only_serving = all(
            name in self.handles
            and (_is_ready(self.handles[name]) or self.handles[name].poll() == record.COMPLETED)
            for name in self.jobs
        )
        return EXIT_OK if only_serving else EXIT_INTERRUPTED

    def records(self) -> dict[str, record.JobRecord | None]:
        """Return the records of the jobs that were submitted, by stage name."""
        found = {}
        for name, handle in self.handles.items():
            job = record.readable_record(handle.job.record_path)
            is_ours = job is not None and job.job_id == handle.job_id
            if self.launcher.in_foreground and not is_ours:
                # It is damaged, or another command has since run the stage in the same folder.
                stage, state = handle.job.stage, handle.poll() or record.RUNNING
                job = record.JobRecord(handle.job_id, stage.name, stage.job.name, state)
            found[name] = job
        return found

    def summary(self) -> str:
        """Return the table of stages, followed by their results, from this run or earlier ones."""
        records, rows, results = self.records(), [], []
        for planned in self.planned:
            state, seconds, outputs = planned.state, "-", _shown_outputs(planned.stage)
            source: Marker | record.JobRecord | None = planned.finding.marker
            if planned.runs:
                source = found = records.get(planned.name)
                state = found.state if found else record.LOST
                if planned.name not in records:
                    state = "not started"
                if found is not None and found.seconds is not None:
                    seconds = f"{found.seconds:.1f}"
                if state != record.COMPLETED:
                    outputs = "-"
            rows.append((planned.name, state, seconds, outputs))
            results += _result_lines(planned.name, source.summary if source else {})
        table = self.console.table(("stage", "state", "seconds", "outputs"), rows)
        folders = [f"results: {planned.stage.job.folder.parent}" for planned in self.planned[:1]]
        return "\n".join(["", table, *folders, *results])

    def submit(self, name: str) -> JobHandle:
        """Write a job's files and its record, and start or queue it.

        Raises:
            SubmissionError: the cluster refuses the job, or another command has submitted one of
                the same stage in the meantime.
        """
        job, launcher = self.jobs[name], self.launcher
        after = dependency([(handle.job, handle.job_id) for handle in self.handles.values()])
        job_folder.prepare_submission(job, launcher, after, self.before.get(name))
        try:
            handle = launcher.submit(job, after)
        except SubmissionError as error:
            changes = {"state": record.FAILED, "error": str(error), "exit_code": EXIT_FAILED}
            record.update_record(job.record_path, "", **changes)
            raise
        self.handles[name] = handle
        with (job.folder / "launcher.log").open("a", encoding="utf-8") as log:
            log.write(f"{record.now()} Submitted {launcher.name} job {handle.job_id}\n")
        self.console.say(f"{name}: job {handle.job_id}, log {handle.log_path}")
        return handle

    def has_ended(self) -> bool:
        """Return whether all submitted jobs have ended."""
        return all(handle.poll() is not None for handle in self.handles.values())

    def _follow(self, handle: JobHandle) -> int:
        """Show a job's progress until it ends; return the exit status."""
        while (status := self._outcome(handle, until_ready=False)) is None:
            self._show(handle)
            time.sleep(_POLL_S)
        return status

    def _show(self, handle: JobHandle) -> None:
        stage = handle.job.stage
        progress = _progress_of(stage)
        if not progress.phase and not self.launcher.in_foreground:
            progress = ProgressState("waiting in the queue")
        if progress.phase:
            self.console.show(stage.name, progress, time.monotonic() - self._stage_started)

    def _outcome(self, handle: JobHandle, *, until_ready: bool) -> int | None:
        """Report that a job has ended or is ready, and return the exit status; None until then."""
        stage = handle.job.stage
        if (state := handle.poll()) is not None:
            found = record.readable_record(handle.job.record_path)
            took = found.seconds if found else None
            after = "" if took is None else f" after {took:.1f} s"
            self.console.say(f"{stage.name}: {state}{after}")
            if state == record.COMPLETED:
                return EXIT_OK
            return (found.exit_code if found else None) or EXIT_FAILED
        if until_ready and _is_ready(handle):
            record.update_record(handle.job.record_path, handle.job_id, state=record.READY)
            self.console.say(f"{stage.name}: {_progress_of(stage).phase}")
            return EXIT_OK
        return None

    def _explain(self, handle: JobHandle) -> None:
        """Print why a job failed: the cause, then the last lines of its log."""
        found = record.readable_record(handle.job.record_path)
        cause = found.error if found and found.error else "no reason was recorded"
        self.console.say(f"\n{handle.job.stage.name} failed: {cause}")
        paths = (handle.log_path, handle.log_path.with_suffix(".err"))
        logs = [path for path in paths if path.exists() and path.stat().st_size]
        if not logs:
            self.console.say(f"nothing was written to {handle.log_path}")
        for path in logs:
            # Skip submitit's own lines.
            lines = [line for line in last_lines(path) if not line.startswith("submitit ")]
            if all(_without_time(line) in cause for line in lines):
                self.console.say(f"log: {path}")  # it only repeats the cause
            else:
                self.console.say("\n  | ".join([f"last lines of {path}:", *lines]))

    def _explain_failures(self) -> None:
        for handle in self.handles.values():
            if handle.poll() in (record.FAILED, record.LOST):
                self._explain(handle)
        for handle in self.handles.values():
            for path in handle.job.stage.other_logs(handle.job_id):
                if path.exists():
                    self.console.say(f"see also {path}")

    def stop_all(self, notice: str = "") -> None:
        """End all running jobs, the last started first; a further Ctrl-C kills them.

        Args:
            notice: Printed once a further Ctrl-C has that effect.
        """
        handles = list(reversed(self.handles.values()))
        try:
            if notice:
                with suppress(OSError):  # Ctrl-C also ended the reader, such as tee
                    self.console.say(notice)
            for handle in handles:
                if handle.poll() is None:
                    handle.stop(handle.job.stage.stop_grace_s())
        except KeyboardInterrupt:
            with uninterrupted(*STOP_SIGNALS):
                for handle in handles:
                    if handle.poll() is None:
                        handle.stop(0)
        for handle in handles:
            if handle.poll() is None:
                name, job_id = handle.job.stage.name, handle.job_id
                self.console.say(f"{name}: job {job_id} does not end; see action=status")


def _without_time(line: str) -> str:
    """Return a line of a job's log without its timestamp."""
    return re.sub(r"^\d{4}-\d\d-\d\dT[\d:]{8}Z ", "", line).strip()


def _progress_of(stage: Stage) -> ProgressState:
    """Return the progress of a job; empty if its file is damaged, which must not end the run."""
    with suppress(DamagedFileError):
        return read_progress(stage.job.progress_path)
    return ProgressState()


def _is_ready(handle: JobHandle) -> bool:
    """Return whether the job has published its readiness file."""
    path = handle.job.stage.readiness_path()
    return path is not None and published_by(path) == handle.job_id


def _shown_outputs(stage: Stage) -> str:
    """Return a stage's output or common folder, relative to the results folder if below it."""
    if not (paths := stage.outputs()):
        return "-"
    place, base = Path(os.path.commonpath(paths)), stage.job.folder.parent
    return str(place.relative_to(base) if place.is_relative_to(base) else place)


def _result_lines(name: str, result: Summary) -> list[str]:
    lines = [f"{name}: {remark}" for remark in result.get("remarks", ())]
    lines += [
        f"{metric}: {value + 0.0:.4g}"  # never -0
        for metric, value in result.get("metrics", {}).items()
    ]
    lines += [f"{task}: {text}" for task, text in result.get("times", {}).items()]
    if "report" in result:
        lines.append(f"report: {result['report']}")
    return lines
