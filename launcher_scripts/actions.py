"""Actions on earlier runs, read from their job records: status, logs and cancel."""

import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path

from foundations.files.lock import is_locked
from launcher_scripts.configuration.diagnosis import is_below
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from launcher_scripts.console import Console
from launcher_scripts.launchers import slurm_state
from launcher_scripts.launchers.base import SUBMISSION_S, copy_from
from stages import STAGES, record
from stages.job import LOCK_NAME
from stages.progress import PROGRESS_NAME, DamagedFileError, read_as, read_progress, write_json

LAST_RUN = "last_run.json"
_POLL_S = 0.5
_LOGS_POLL_S = 2.0  # each poll queries Slurm
_CANCEL_S = 60.0
# Overrides of these keys alone do not select a run: the action applies to the last one.
_RUN_INDEPENDENT = (
    "action", "base_results_dir", "cluster", "cluster_type", "debug", "dry_run",
    "launcher_scripts_path", "stages", "wait",
)  # fmt: skip
_QUEUED_CLUSTER = "bcm"  # its jobs outlive the command


@dataclass(frozen=True)
class _LastRun:
    """The results folders of a run, or of all rows of one."""

    results_dirs: tuple[str, ...]


def record_last_run(base_results_dir: Path, *results_dirs: Path) -> None:
    """Record the results folders of the run, or of the rows, that start now."""
    write_json(base_results_dir / LAST_RUN, _LastRun(tuple(map(str, results_dirs))))


def run_action(config: Config, console: Console, overrides: Sequence[str] = ()) -> int:
    """Run `action` on `run_dir`, on the run that `overrides` select, or on the last run.

    Return the exit status.
    """
    run_dirs = _run_dirs(config)
    is_named = not all(is_below(override, _RUN_INDEPENDENT) for override in overrides)
    if config.run_dir is None and is_named and config.results_dir not in run_dirs:
        run_dirs = [config.results_dir]
    if not run_dirs:
        console.say(
            f"{config.base_results_dir} records no run; give the results folder of one as "
            "run_dir=<folder>."
        )
        return EXIT_USAGE
    status = EXIT_OK
    queue = cache(slurm_state.queue_now)
    for results_dir in run_dirs:
        damage: list[str] = []
        records = jobs_in(results_dir, queue, damage)
        if not (records or damage):
            console.say(
                f"{results_dir} holds no jobs; give a folder with <stage>/job.json in it as "
                "run_dir=<folder>."
            )
            status = max(status, EXIT_USAGE)
            continue
        console.say("\n".join([str(results_dir), *damage]))
        status = max(status, EXIT_FAILED if damage else EXIT_OK)
        if config.action == "cancel" and config.is_dry_run:
            for job in records:
                if not job.is_final:
                    console.say(f"dry run: {job.stage} (job {job.job_id}) would be cancelled")
        elif config.action == "status":
            status = max(status, _status(results_dir, records, queue(), console))
        else:
            act = _logs if config.action == "logs" else cancel_jobs
            status = max(status, act(results_dir, records, console))
    return status


def _run_dirs(config: Config) -> list[Path]:
    """Return `run_dir`, or the results folders of the last run: several after an upgrade."""
    if config.run_dir is not None:
        return [config.run_dir]
    path = config.base_results_dir / LAST_RUN
    last = read_as(path, _LastRun, "the folder of the last run")
    return [] if last is None else [*map(Path, last.results_dirs)]


def read_job(
    results_dir: Path, stage: str, queue: slurm_state.SlurmQueue | None = None
) -> record.JobRecord | None:
    """Return a job's record, corrected from the scheduler or from this machine's processes."""
    path = results_dir / stage / record.RECORD_NAME
    job = record.read_record(path)
    if job is None or job.is_final:
        return job
    if job.cluster == _QUEUED_CLUSTER:
        return slurm_state.reconcile(path, queue)
    # Before the job has an id, `process` is that of the submitting command.
    has_process = bool(job.job_id) and job.process is not None
    if has_process and _is_local(job) and not _is_process_of(job, path.parent):
        error = "the job ended without a result: killed, or the machine was restarted"
        return record.exchange_record(path, job, replace(job, state=record.LOST, error=error))
    return job


def jobs_in(
    results_dir: Path,
    get_queue: Callable[[], slurm_state.SlurmQueue] = slurm_state.queue_now,
    damage: list[str] | None = None,
) -> list[record.JobRecord]:
    """Return the jobs of a results folder in stage order.

    They are known from their records, Slurm's queue and the locks that live jobs hold. A stage has
    several jobs if its record does not name them all: a chain, or jobs whose record was deleted or
    replaced. The last of those in the queue takes over the record unless a live job has it. A
    damaged record is skipped, and with `damage`, one that cannot be read; its problem is added to
    that list, unless it is damaged and the queue holds jobs of the stage.

    Raises:
        OSError: a record cannot be read, and there is no list for its problem.
    """
    queue = get_queue()
    queued = slurm_state.jobs_below(results_dir, queue)
    jobs = []
    for stage in STAGES:
        path, job = results_dir / stage / record.RECORD_NAME, None
        try:
            job = read_job(results_dir, stage, queue)
        except DamagedFileError as damaged:
            if damage is not None and stage not in queued:
                damage.append(str(damaged))
        except OSError as unreadable:
            if damage is None:
                raise
            damage.append(_unreadable(path, unreadable))
        # An ended job waits again after `scontrol requeue`.
        unrecorded = [
            each
            for each in queued.get(stage, ())
            if job is None
            or each != job.job_id
            or (job.is_final and queue.jobs[each].state == record.SUBMITTED)
        ]
        if unrecorded and (job is None or job.is_final or not job.job_id):
            job_id = unrecorded.pop()
            new = _new_record(path.parent, job_id, queue.jobs[job_id].state)
            if job is not None and not job.is_final:  # the command has yet to record the job id
                new = replace(job, job_id=new.job_id, log=new.log, host="", process=None)
            job = record.exchange_record(path, job, new)
        elif job is not None and _is_abandoned(job):
            error = "the command that was submitting it has ended, and there is no such job"
            job = record.exchange_record(path, job, replace(job, state=record.LOST, error=error))
        if job is not None:  # another user may have changed its stage or cluster
            is_queued = job.job_id in queued.get(stage, ())
            cluster = _QUEUED_CLUSTER if is_queued else job.cluster
            jobs.append(replace(job, stage=stage, cluster=cluster))
        jobs += [_new_record(path.parent, each, queue.jobs[each].state) for each in unrecorded]
        known = {each.job_id for each in jobs if each.stage == stage and not each.is_final}
        jobs += [each for each in _lock_holders(path.parent) if each.job_id not in known]
    return jobs


def _new_record(folder: Path, job_id: str, state: str | None) -> record.JobRecord:
    """Return a record for a job of a stage's folder; without a scheduler, its id is a time."""
    cluster = "local" if job_id.count("_") == 2 else _QUEUED_CLUSTER
    name, log = folder.name, next(folder.glob(f"*_{job_id}.out"), "")
    return record.JobRecord(job_id, name, name, state or record.SUBMITTED, cluster, log=str(log))


def _lock_holders(folder: Path) -> Iterator[record.JobRecord]:
    """Yield a record for each job that holds its lock in a stage's folder."""
    for path in filter(is_locked, folder.glob(LOCK_NAME.format(job="*"))):
        job = _new_record(folder, path.stem.partition("-")[2], record.RUNNING)
        owner = path.read_text().strip()  # empty if the disk was full
        job = replace(job, process=int(owner) if owner.isdigit() else None)
        yield replace(job, host=socket.gethostname()) if _is_process_of(job, folder) else job


def _is_abandoned(job: record.JobRecord) -> bool:
    """Return whether the command that was to submit a job seems to have ended without doing so."""
    if job.job_id or job.is_final:
        return False
    has_ended = _is_local(job) and not Path(f"/proc/{job.process}").exists()
    if has_ended or not job.submitted_at:
        return True
    # The command ran on another machine, or its process id was reused. Clocks may have been reset.
    age = datetime.now(timezone.utc) - datetime.fromisoformat(job.submitted_at)
    return abs(age.total_seconds()) > SUBMISSION_S


def live_job_problem(job: record.JobRecord, results_dir: Path) -> str | None:
    """Return why a stage cannot be submitted while an earlier job of it is live.

    The record would name only the new job, and no action could find the earlier one.
    """
    folder = results_dir / job.stage
    if job.is_final or not (
        job.cluster == _QUEUED_CLUSTER
        or _is_local(job)
        or is_locked(folder / LOCK_NAME.format(job=job.job_id))
    ):
        return None
    at = f"process {job.process}" if job.process is not None and _is_local(job) else job.host
    name = f"job {job.job_id}" if job.job_id else "a job that another command is submitting"
    return (
        f"{job.stage}: {name}{f' ({at})' if at else ''} is {job.state} in {folder}; end it with "
        f"action=cancel {shlex.quote(f'run_dir={results_dir}')}, or choose another "
        "export.run.results_dir."
    )


def _is_local(job: record.JobRecord) -> bool:
    return job.host == socket.gethostname()


def _is_process_of(job: record.JobRecord, folder: Path) -> bool:
    """Return whether the recorded process id still belongs to the job: ids are reused."""
    try:
        command = Path(f"/proc/{job.process}/cmdline").read_bytes()
    except OSError:
        return False
    # Symbolic links may give the results folder other names.
    return os.fsencode(Path(folder.name, "submitit", job.job_id)) in command


def _status(
    results_dir: Path,
    records: list[record.JobRecord],
    queue: slurm_state.SlurmQueue,
    console: Console,
) -> int:
    # In a chain, the remarks on the serving job name its predecessor and successor.
    chained = {other for job in records for other in (job.predecessor, job.successor)}
    records = [job for job in records if job.job_id not in chained]
    rows = [
        (
            *(job.stage, job.job_id or "-", job.state, job.host or "-", _elapsed(job)),
            "-" if job.exit_code is None else str(job.exit_code),
        )
        for job in records
    ]
    console.say(console.table(("stage", "job", "state", "node", "elapsed", "exit"), rows))
    for job in records:
        for text in filter(None, _remarks(job, results_dir / job.stage, queue)):
            console.say(f"{job.stage}: {text}")
    for job in records:
        has_log = bool(job.log) and Path(job.log).exists()
        console.say(f"{job.stage}: {f'log {job.log}' if has_log else 'no log'}")
    return _exit_status(records)


def _remarks(job: record.JobRecord, folder: Path, queue: slurm_state.SlurmQueue) -> Iterator[str]:
    """Yield why a job failed or is waiting, or what it is doing.

    The error of a job that is not over is that of its life before a requeue.
    """
    if job.is_final:
        yield job.error
        return
    try:
        in_queue = job.cluster == _QUEUED_CLUSTER and job.job_id
        answer = queue.state(job.job_id) if in_queue else None
        if answer is not None and (reason := answer.waits_for):
            is_dependent = job.dependency and reason == "Dependency"
            yield f"in the queue: {reason}" + (f" ({job.dependency})" if is_dependent else "")
        else:
            yield slurm_state.UNREACHABLE * bool(in_queue and answer is None)
            phase = read_progress(folder / PROGRESS_NAME).phase
            yield f"{phase}; job {job.successor} follows" if job.successor else phase
    except DamagedFileError as error:
        yield str(error)
    except OSError as error:
        yield _unreadable(folder / PROGRESS_NAME, error)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read ({error.strerror}); make it readable for this user"


def _exit_status(records: Iterable[record.JobRecord]) -> int:
    bad = (record.FAILED, record.LOST, record.CANCELLED)
    return EXIT_FAILED if any(job.state in bad for job in records) else EXIT_OK


def _logs(results_dir: Path, records: list[record.JobRecord], console: Console) -> int:
    for job in records:
        console.say(f"==> {job.stage}: {job.log or 'no log'}")
        if not job.log:
            continue
        log = Path(job.log)
        positions = dict.fromkeys((log, log.with_suffix(".err")), 0)
        while True:
            has_ended = (read_job(results_dir, job.stage) or job).is_final
            for path in positions:
                positions[path] = copy_from(path, positions[path], console.write)
            if has_ended:
                break
            time.sleep(_LOGS_POLL_S)
    return _exit_status(read_job(results_dir, job.stage) or job for job in records)


def cancel_jobs(results_dir: Path, records: list[record.JobRecord], console: Console) -> int:
    """Cancel every job that has not ended, in reverse order of their dependencies."""
    running = [job for job in records if not job.is_final]
    if not running:
        console.say("nothing to cancel: every job has ended")
        return EXIT_OK
    asked: dict[str, str] = {}  # job id -> why the job cannot be cancelled, "" if it can
    deadline = time.monotonic() + _CANCEL_S
    while running := [job for job in running if not asked.get(job.job_id)]:
        for job in reversed(running):
            if job.job_id in asked:
                continue
            asked[job.job_id] = objection = _cancel_one(job, results_dir)
            if objection:
                console.say(f"{job.stage} (job {job.job_id}) cannot be cancelled: {objection}")
            else:
                console.say(f"cancelling {job.stage} (job {job.job_id})")
        if time.monotonic() > deadline:
            console.say(f"some jobs have not ended within {_CANCEL_S:g} s; see action=status")
            return EXIT_FAILED
        time.sleep(_POLL_S)
        # A job of a chain may have submitted its successor in the meantime.
        running = [job for job in jobs_in(results_dir, damage=[]) if not job.is_final]
    return EXIT_FAILED if any(asked.values()) else EXIT_OK


def _cancel_one(job: record.JobRecord, results_dir: Path) -> str:
    """Ask a job to end; return why that is impossible, or an empty string."""
    if job.cluster == _QUEUED_CLUSTER:
        return slurm_state.cancel(job.job_id) if job.job_id else ""
    if not _is_local(job):
        return f"it runs on {job.host or 'another machine'}; repeat the command there"
    if job.process is not None and _is_process_of(job, results_dir / job.stage):
        with suppress(ProcessLookupError):
            os.kill(job.process, signal.SIGTERM)
    return ""


def _elapsed(job: record.JobRecord) -> str:
    """Return the running time of a job as [D-]H:MM:SS."""
    if not job.started_at:
        return "-"
    began, ended = map(datetime.fromisoformat, (job.started_at, job.ended_at or record.now()))
    return clock((ended - began).total_seconds() if job.seconds is None else job.seconds)


def clock(seconds: float) -> str:
    """Return seconds as [D-]H:MM:SS."""
    return re.sub(" days?, ", "-", str(timedelta(seconds=round(max(seconds, 0)))))
