"""The process of a server, with the arguments FD, REPOSITORY and perhaps `engine`: see `process`.

FD is the connection to its owner. REPOSITORY is for the list of processes alone. What takes time to
import is imported before the settings come: an owner may keep such a process for its next start.
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
    # Idle connections are cheap, as long as there are descriptors for them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connection = Connection(int(sys.argv[1]))
    if WITH_ENGINE in sys.argv[3:]:
        start_early(sys.argv[2])
    import_modules(_MODULES)
    from inference.host.process import serve_host

    with contextlib.suppress(EOFError):  # the owner may end before it needs this process
        serve_host(connection.recv(), connection)
