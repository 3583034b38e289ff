"""The interface between a model in a server and the server's supervisor."""

import contextlib
import os
import socket

# Path of the socket on which models report why they end; empty without a supervisor.
REPORTS_VARIABLE = "SLIPWAY_REPORTS"
# Number of restarts after failures.
RESTARTS_VARIABLE = "SLIPWAY_RESTARTS"
# Parameter of canary requests. A busy model that makes progress answers BUSY at once instead of
# queueing a canary.
CANARY_PARAMETER, BUSY = "slipway_canary", "busy"
# Prefix of this project's own request parameters, which clients may not send.
OWN_PREFIX = "slipway_"
_MAX_REPORT_BYTES = 32 * 1024  # bytes of a report


def report_end(reason: str) -> bool:
    """Report to the supervisor why this process is about to end; return False without one."""
    path = os.environ.get(REPORTS_VARIABLE)
    if not path:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.sendto(reason.encode(errors="replace")[:_MAX_REPORT_BYTES], path)
    return True
