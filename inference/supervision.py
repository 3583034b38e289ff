"""The agreement between a model in the server and the process that looks after the server."""

from __future__ import annotations

# In the environment of a server that ends when a process of one of its models does.
SUPERVISED_VARIABLE = "SLIPWAY_SUPERVISED"
# A parameter of requests that only ask whether a model answers. A model that is busy and makes
# progress answers such a request at once with BUSY instead of queueing it.
CANARY_PARAMETER, BUSY = "slipway_canary", "busy"
