"""Unix sockets of a tritonserver, in a folder that only its owner can enter."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from inference.plain_path import is_plain
from inference.private_folder import PrivateFolder

# The kernel keeps a socket's name in 108 bytes, which `/slipway-sockets-12345678/grpc:8001` is part
# of.
_LONGEST_FOLDER = 68


class ServerSockets:
    """The sockets in one such folder, whose owner has it as a `PrivateFolder`."""

    def __init__(self, folder: Path, own: PrivateFolder | None = None) -> None:
        self.folder = folder
        self._own = own

    @property
    def http(self) -> Path:
        """Socket of tritonserver's HTTP, including its control of models."""
        return self.folder / "http"

    @property
    def grpc(self) -> Path:
        """Socket of tritonserver's gRPC, which adds the port to the given name."""
        return self.folder / "grpc:8001"

    @property
    def metrics(self) -> Path:
        """Socket of tritonserver's metrics."""
        return self.folder / "metrics"

    @property
    def listening(self) -> Path:
        """An empty file that appears once the front listens at every port."""
        return self.folder / "listening"

    def note_use(self) -> None:
        """Note a request for a model, in the time of that file."""
        with contextlib.suppress(OSError):  # not there yet
            os.utime(self.listening)

    def last_used(self) -> float:
        """Return the Unix time of the last such request, or of the front's start."""
        return self.listening.stat().st_mtime

    @property
    def unready(self) -> Path:
        """An empty file that exists while a model does not answer canaries."""
        return self.folder / "unready"

    def server_options(self) -> list[str]:
        """Return the options with which tritonserver listens only on these sockets."""
        return [
            f"--http-address=unix:{self.http}",
            f"--grpc-address=unix:{self.folder / 'grpc'}",
            "--grpc-port=8001",
            f"--metrics-address=unix:{self.metrics}",
        ]

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
