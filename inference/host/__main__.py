"""`python -m inference.host FD`: see `process`. FD is the connection to its owner."""

import os
import resource
import sys
from multiprocessing.connection import Connection

from inference.front.link import HostSettings
from inference.host.engine_start import start_early


def main() -> None:
    """Serve until a signal or the owner's end."""
    connection = Connection(int(sys.argv[1]))
    settings: HostSettings = connection.recv()
    os.chdir(settings.folder)
    # Idle connections are cheap, as long as there are descriptors for them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if settings.triton is None:
        start_early(settings.repository)
    from inference.host.process import serve_host  # takes time to import

    serve_host(settings, connection)


if __name__ == "__main__":
    main()
