"""The process that runs a stage: its job and node, its stop signals, and its child processes."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from foundations.files.disk import full_disk
from inference.server.processes import process_state
from inference.system.launch_environment import LaunchEnvironment
from inference.system.parent_process import StopRequested, end_with_parent, stop_signals
from stages.base import Stage, Summary

# The id of the job, for every process that it starts; the launcher sets it.
JOB_ID_VARIABLE = "SLIPWAY_JOB_ID"
# The id of the process whose end ends a job that runs in its foreground.
OWNER_VARIABLE = "SLIPWAY_OWNER"
# Every process of a job inherits it, and is found by it at the job's end.
MARK_VARIABLE = "SLIPWAY_JOB_MARK"
# That ask a job to end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# UTC, ISO 8601, as records have it.
LOG_TIME = "%Y-%m-%dT%H:%M:%SZ"
_has_times = False  # of the lines of this process's log


def job_id_here() -> str:
    """Return the id of the job that this process belongs to."""
    return os.environ.get(JOB_ID_VARIABLE, str(os.getpid()))


def node_name() -> str:
    """Return the node's name: the scheduler's (nodes of a test cluster may share a host name)."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def node_address() -> str | None:
    """Return a name of this node that can be looked up: the scheduler's, else the host's own."""
    for name in dict.fromkeys((node_name(), socket.gethostname())):
        with contextlib.suppress(OSError):
            if socket.getaddrinfo(name, None):
                return name
    return None


def log_line(text: str) -> None:
    """Write to the job's log; a full disk, on which that is impossible, ends no job."""
    at = time.strftime(f"{LOG_TIME} ", time.gmtime()) if _has_times else ""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{at}{text}\n")
        sys.stderr.flush()


def begin_log() -> None:
    """Give lines of this process the time from now on, and those it starts UTC as time zone."""
    global _has_times
    _has_times = True
    os.environ["TZ"] = "UTC"
    time.tzset()


def close_to_others() -> None:
    """Let this user alone change the files that this process makes, whatever the umask.

    A stricter umask, which keeps others from reading them, stays.
    """
    os.umask(os.umask(0o077) | 0o022)


def assist(stage: Stage, place: LaunchEnvironment) -> Summary:
    """Do the part of a rank other than the first, which alone keeps records and writes results."""
    with stop_signals(*STOP_SIGNALS), contextlib.suppress(StopRequested):
        stage.assist(place)
    return {}


def cause_of(error: BaseException, *, folder: Path | None = None) -> str:
    """Return the text of an error: the message alone when it was written for users.

    `folder` is where the process writes; by default where it runs.
    """
    text = str(error).strip()
    if isinstance(error, OSError) and (full := full_disk(error, folder or Path.cwd())):
        return full
    if isinstance(error, (ValueError, RuntimeError, OSError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def end_processes_of_job(mark: str | None = None) -> None:
    """Kill the processes that a job has left behind, wherever they are in the process tree.

    This process and those above it, which wait for it and end by themselves, are spared. `mark` is
    the value of MARK_VARIABLE; this process's own by default.
    """
    value = mark or os.environ.get(MARK_VARIABLE)
    if not value:
        return
    wanted = f"{MARK_VARIABLE}={value}".encode()
    spared = [os.getpid(), *_ancestors(os.getpid())]
    for entry in Path("/proc").glob("[0-9]*"):
        # A process may be gone by now, or belong to another user.
        with contextlib.suppress(OSError):
            is_of_job = wanted in (entry / "environ").read_bytes().split(b"\0")
            if is_of_job and (pid := int(entry.name)) not in spared:
                os.kill(pid, signal.SIGKILL)


def end_with_owner() -> None:
    """End this job with the process that it runs in the foreground of, if there is one.

    Raises:
        StopRequested: that process is gone already.
    """
    if os.environ.get(OWNER_VARIABLE):
        end_with_parent(signal.SIGTERM)
        if has_lost_owner():
            raise StopRequested


def has_lost_owner() -> bool:
    """Return whether the process that this job runs in the foreground of is gone."""
    return os.environ.get(OWNER_VARIABLE, "") not in ("", str(os.getppid()))


def _ancestors(pid: int) -> Iterator[int]:
    """Yield the process that started this one, the one that started that, and so on."""
    while (state := process_state(pid)) is not None and (pid := state.parent) > 1:
        yield pid
