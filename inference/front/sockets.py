"""Unix sockets of a tritonserver, in a folder that only its owner can enter."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from inference.private_folder import PrivateFolder, is_plain

# Of the 108 bytes of a socket's name, `/slipway-sockets-12345678/grpc:8001` takes the rest.
_LONGEST_FOLDER = 68
# A message has up to 8 MiB outside of tensors; a byte may take three.
_MOST_METADATA_BYTES = 64 << 20
# Of channels to such a socket. A server that does not listen yet is tried again soon: after a
# refused connection gRPC would wait for a second, and longer each time.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # An error quotes what a request has named: the front reads it whole, and shortens it.
    ("grpc.max_metadata_size", _MOST_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MOST_METADATA_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    *((f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "max")),
]


class ServerSockets:
    """The sockets in one such folder, whose owner has it as a `PrivateFolder`.

    Attributes:
        http, grpc, metrics: tritonserver's; its HTTP also controls models.
        reports: at which models report to the server's supervisor why they end.
    """

    def __init__(self, folder: Path, own: PrivateFolder | None = None) -> None:
        self.folder = folder
        self._own = own
        self.http, self.metrics, self.reports = (
            folder / name for name in ("http", "metrics", "reports")
        )
        self.grpc = folder / "grpc:8001"  # tritonserver adds the port to the name that it is given

    def note_use(self) -> None:
        """Note a request for a model, in the time of the folder."""
        with contextlib.suppress(OSError):  # it goes with the server
            os.utime(self.folder)

    def last_used(self) -> float:
        """Return the Unix time of the last such request, or of the server's start."""
        return self.folder.stat().st_mtime

    def remove(self) -> None:
        """Remove the folder."""
        if self._own is not None:
            self._own.remove()
        shutil.rmtree(self.folder, ignore_errors=True)


def new_sockets() -> ServerSockets:
    """Return the sockets of a new server, in a new folder of mode 700 on this machine's disk."""
    place = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    too_long = len(os.fsencode(place)) > _LONGEST_FOLDER
    if too_long or not is_plain(place) or not os.access(place, os.W_OK):
        place = "/tmp"
    folder = PrivateFolder("sockets", place=Path(place))
    return ServerSockets(folder.path, folder)
