"""Temporary folders: private ones, and ones with names that are safe for tritonserver.

Triton's Python backend starts an interpreter with an unquoted shell command and assumes ASCII
names: with a space in the repository's path, a model would load forever.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_PREFIX = "slipway-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A new folder of mode 700, locked until this process ends.

    The lock marks the folder as in use. The next process of the same user and kind removes folders
    without a lock, which killed processes have left behind.
    """

    def __init__(self, kind: str, *, place: Path | None = None) -> None:
        """Create `<place>/slipway-<kind>-*`; `place` defaults to the folder of temporary files."""
        place = place or Path(tempfile.gettempdir())
        self._closing = threading.Lock()
        for path in abandoned_paths(place.glob(f"{_PREFIX}{kind}-*"), _FOLDER):
            shutil.rmtree(path, ignore_errors=True)
        self._held, self.path = held_path(
            lambda: Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=place)), _FOLDER
        )

    def remove(self) -> None:
        """Remove the folder; may be called repeatedly and by several threads."""
        shutil.rmtree(self.path, ignore_errors=True)
        with self._closing:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1


def held_path(make: Callable[[], Path], flags: int) -> tuple[int, Path]:
    """Create a path and return (descriptor, path), locked while the descriptor is open.

    On a file system without locks the path is not locked, and `abandoned_paths` finds none.
    """
    while True:
        path = make()
        held = os.open(path, flags | _SAFE, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held), path.lstat()):
                return held, path
        os.close(held)  # before it was locked, another process removed it as abandoned


def abandoned_paths(paths: Iterable[Path], flags: int) -> Iterator[Path]:
    """Lock and yield each of this user's paths that no process holds any longer."""
    for path in paths:
        with contextlib.suppress(OSError):
            held = os.open(path, flags | _SAFE)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path
            finally:
                os.close(held)


def is_plain(path: Path | str) -> bool:
    """Return whether a path needs no quoting in a shell and is ASCII."""
    return shlex.quote(str(path)) == str(path)


def plain_temporary_folder() -> Path:
    """Return the folder of temporary files if its name is plain, else /tmp."""
    folder = tempfile.gettempdir()
    return Path(folder if is_plain(folder) else "/tmp")


@contextlib.contextmanager
def plain_folder(folder: str) -> Iterator[str]:
    """Yield a plain path to a folder: its own, or a link to it in a temporary folder.

    A URL stays as it is.
    """
    if is_plain(folder) or not Path(folder).is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="slipway-", dir=plain_temporary_folder()) as home:
        link = Path(home) / "repository"
        link.symlink_to(Path(folder).resolve())
        yield str(link)
