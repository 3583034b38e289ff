"""The process that runs a stage: its job, node, log, stop signals and child processes."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from foundations.files.disk import full_disk
from inference.server.processes import process_state
from inference.system.launch_environment import LaunchEnvironment
from inference.system.parent_process import StopRequested, end_with_parent, stop_signals
from stages.base import Stage, Summary

# Job id, set by the launcher for every process of the job.
JOB_ID_VARIABLE = "SLIPWAY_JOB_ID"
# Process id of the command in whose foreground the job runs; the job ends with that process.
OWNER_VARIABLE = "SLIPWAY_OWNER"
# Every process of a job inherits this mark, by which it is found when the job ends.
MARK_VARIABLE = "SLIPWAY_JOB_MARK"
# Signals that ask a job to end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# UTC, ISO 8601, as in records.
LOG_TIME = "%Y-%m-%dT%H:%M:%SZ"
_has_times = False  # whether this process's log lines begin with the time


def job_id_here() -> str:
    """Return the id of the job that this process belongs to."""
    return os.environ.get(JOB_ID_VARIABLE, str(os.getpid()))


def node_name() -> str:
    """Return the node's name: the scheduler's (nodes of a test cluster may share a host name)."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_address() -> str | None:
    """Return a name of this node that can be resolved: the scheduler's, or else the host name."""
    for name in dict.fromkeys((node_name(), socket.gethostname())):
        with suppress(OSError):
            if socket.getaddrinfo(name, None):
                return name
    return None


def log_line(text: str) -> None:
    """Write a line to the job's log; errors, such as a full disk, are ignored."""
    at = time.strftime(f"{LOG_TIME} ", time.gmtime()) if _has_times else ""
    with suppress(OSError):
        sys.stderr.write(f"{at}{text}\n")
        sys.stderr.flush()


def use_utc_log_times() -> None:
    """Prefix this process's log lines with the UTC time; child processes inherit TZ=UTC."""
    global _has_times
    _has_times = True
    os.environ["TZ"] = "UTC"
    time.tzset()


def restrict_umask() -> None:
    """Make new files of this process writable by this user only; a stricter umask stays."""
    os.umask(os.umask(0o077) | 0o022)


def assist(stage: Stage, place: LaunchEnvironment) -> Summary:
    """Run the part of a rank other than the first; only the first writes records and results."""
    with stop_signals(*STOP_SIGNALS), suppress(StopRequested):
        stage.assist(place)
    return {}


def cause_of(error: BaseException, *, folder: Path | None = None) -> str:
    """Return the text of an error: only the message if it was written for users.

    `folder`, by default the current one, is where the process writes: a full disk there is named.
    """
    text = str(error).strip()
    if isinstance(error, OSError) and (full := full_disk(error, folder or Path.cwd())):
        return full
    if isinstance(error, (ValueError, RuntimeError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_processes_of_job(mark: str | None = None) -> None:
    """Kill the processes that a job left behind, wherever they are in the process tree.

    This process and its ancestors, which wait for it, are spared. `mark` is the value of
    MARK_VARIABLE, by default this process's own.
    """
    value = mark or os.environ.get(MARK_VARIABLE)
    if not value:
        return
    wanted = f"{MARK_VARIABLE}={value}".encode()
    spared = [os.getpid(), *_ancestors(os.getpid())]
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may have ended by now, or belong to another user.
        with suppress(OSError):
            is_of_job = wanted in (entry / "environ").read_bytes().split(b"\0")
            if is_of_job and (pid := int(entry.name)) not in spared:
                os.kill(pid, signal.SIGKILL)


def end_with_owner() -> None:
    """Make this job end with the command in whose foreground it runs, if there is one.

    Raises:
        StopRequested: that command has already ended.
    """
    if os.environ.get(OWNER_VARIABLE):
        end_with_parent(signal.SIGTERM)
        if has_lost_owner():
            raise StopRequested


def has_lost_owner() -> bool:
    """Return whether the command in whose foreground this job runs has ended."""
    return os.environ.get(OWNER_VARIABLE, "") not in ("", str(os.getppid()))


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the ids of the parent process, its parent, and so on."""
    while (state := process_state(pid)) is not None and (pid := state.parent) > 1:
        yield pid
