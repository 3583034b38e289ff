"""A folder of a process among temporary files; the next one removes what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path

_PREFIX = "slipway-"


class PrivateFolder:
    """A new folder of mode 700, locked for as long as this process lives.

    The lock shows the next process of the same user and kind that the folder is in use. The folders
    of processes that were killed have none, and are removed.
    """

    def __init__(self, kind: str, *, place: Path | None = None) -> None:
        """Make it as `<place>/slipway-<kind>-*`; without a place, where temporary files go."""
        place = place or Path(tempfile.gettempdir())
        self._closing = threading.Lock()
        remove_abandoned_folders(kind, place)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=place))
            self._held = _opened(self.path)
            with contextlib.suppress(OSError):  # file systems without locks: nothing is removed
                fcntl.flock(self._held, fcntl.LOCK_EX)
            if _is_at(self._held, self.path):
                return
            os.close(self._held)  # another process took it for abandoned before it was locked

    def remove(self) -> None:
        """Remove the folder; may be called again, and by several threads."""
        shutil.rmtree(self.path, ignore_errors=True)
        with self._closing:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1


def remove_abandoned_folders(kind: str, place: Path) -> None:
    """Remove the folders of one kind whose processes have ended without doing so."""
    for path in place.glob(f"{_PREFIX}{kind}-*"):
        with contextlib.suppress(OSError):
            held = _opened(path)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(held)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_at(held: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(held), path.lstat())
    return False
