"""The kinds of server that can serve a repository."""

import os
import shutil

SLIPWAY, TRITONSERVER, AUTO = "slipway", "tritonserver", "auto"
SERVERS = (AUTO, SLIPWAY, TRITONSERVER)
SERVER_VARIABLE = "TRITON_SERVER"


def has_triton() -> bool:
    """Return whether a tritonserver is available: in TRITON_SERVER or on PATH."""
    return bool(os.environ.get(SERVER_VARIABLE) or shutil.which(TRITONSERVER))


def chosen_server(wanted: str, *, needs_triton: bool) -> str:
    """Return the kind of server; "auto" is tritonserver if it is needed or available."""
    if wanted != AUTO:
        return wanted
    return TRITONSERVER if needs_triton or has_triton() else SLIPWAY
