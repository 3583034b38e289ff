"""The server process, started with the arguments FD, REPOSITORY and optionally `engine`.

FD is the connection to its owner; REPOSITORY only shows in the process list. Slow imports happen
before the settings arrive, so that an owner can keep such a process ready for its next start.
"""

import contextlib
import resource
import sys
from multiprocessing.connection import Connection

from inference.front.link import WITH_ENGINE
from inference.host.engine_start import start_early
from inference.system.parent_process import end_with_parent
from inference.system.process_memory import import_modules

_MODULES = ("inference.host.process", "tokenizers")


def main() -> None:
    """Serve until a signal or the owner's end."""
    end_with_parent()
    # Idle connections need little but a file descriptor each.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    connection = Connection(int(sys.argv[1]))
    if WITH_ENGINE in sys.argv[3:]:
        start_early(sys.argv[2])
    import_modules(_MODULES)
    from inference.host.process import serve_host

    with contextlib.suppress(EOFError):  # the owner has ended without using this process
        serve_host(connection.recv(), connection)
