"""What a process of a job knows of itself: the job, and the node that it runs on."""

from __future__ import annotations

import contextlib
import os
import socket

# Names the job to everything it starts; the launcher sets it.
JOB_ID_VARIABLE = "SLIPWAY_JOB_ID"


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
