"""A folder of a process among temporary files; the next one removes what a killed one left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PREFIX = "slipway-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A new folder of mode 700, locked for as long as this process lives.

    The lock shows the next process of the same user and kind that the folder is in use. The folders
    of processes that were killed have none, and are removed.
    """

    def __init__(self, kind: str, *, place: Path | None = None) -> None:
        """Make it as `<place>/slipway-<kind>-*`; without a place, where temporary files go."""
        place = place or Path(tempfile.gettempdir())
        self._closing = threading.Lock()
        for path in abandoned_paths(place.glob(f"{_PREFIX}{kind}-*"), _FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        self._held, self.path = held_path(
            lambda: Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=place)), _FOLDER
        )

    def remove(self) -> None:
        """Remove the folder; may be called again, and by several threads."""
        shutil.rmtree(self.path, ignore_errors=True)
        with self._closing:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1


def held_path(make: Callable[[], Path], flags: int) -> tuple[int, Path]:
    """Return a descriptor and its path, locked for as long as the descriptor is open.

    Where there are no locks it has none, and nothing abandoned is found.
    """
    while True:
        path = make()
        held = os.open(path, flags | _SAFE, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held), path.lstat()):
                return held, path
        os.close(held)  # another process took it for abandoned before it was locked


def abandoned_paths(paths: Iterable[Path], flags: int) -> Iterator[Path]:
    """Yield those of this user's paths, locked, that no process holds any more."""
    for path in paths:
        with contextlib.suppress(OSError):
            held = os.open(path, flags | _SAFE)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path
            finally:
                os.close(held)
