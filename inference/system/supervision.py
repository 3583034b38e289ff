"""The interface between a model in the server and the supervisor of the server."""

import contextlib
import os
import socket

# Path of the socket of the server's supervisor, which ends a server when a process of one of its
# models ends; empty without one.
REPORTS_VARIABLE = "SLIPWAY_REPORTS"
# The number of restarts after failures.
RESTARTS_VARIABLE = "SLIPWAY_RESTARTS"
# A parameter of canary requests. A busy model that makes progress answers one at once with BUSY
# instead of queueing it.
CANARY_PARAMETER, BUSY = "slipway_canary", "busy"
# The beginning of the names of all such parameters; a server takes none from clients.
OWN_PREFIX = "slipway_"
_LONGEST = 32 * 1024  # bytes of a report


def report_end(reason: str) -> bool:
    """Report to the supervisor why this process is about to end; return False without one."""
    path = os.environ.get(REPORTS_VARIABLE)
    if not path:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.sendto(reason.encode(errors="replace")[:_LONGEST], path)
    return True
