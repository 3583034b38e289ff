"""Names shared by a model in the server and the supervisor of the server."""

from __future__ import annotations

# Set for a server that ends when a process of one of its models ends.
SUPERVISED_VARIABLE = "SLIPWAY_SUPERVISED"
# There, too: the number of restarts after failures.
RESTARTS_VARIABLE = "SLIPWAY_RESTARTS"
# A parameter of canary requests. A busy model that makes progress answers one at once with BUSY
# instead of queueing it.
CANARY_PARAMETER, BUSY = "slipway_canary", "busy"
