"""Folders among temporary files: private ones, and such with names that tritonserver can take.

Its Python backend starts an interpreter with an unquoted shell command and assumes ASCII names:
with a space in the repository's path, a model would load for ever.
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
    """A new folder of mode 700, locked for as long as this process lives.

    The lock shows the next process of the same user and kind that the folder is in use. The folders
    of processes that were killed have none, and are removed by the next one.
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


def is_plain(path: Path | str) -> bool:
    """Return whether a path is one word to a shell, of plain ASCII characters."""
    return shlex.quote(str(path)) == str(path)


def plain_temporary_folder() -> Path:
    """Return where temporary files go, if its name is safe, else /tmp."""
    folder = tempfile.gettempdir()
    return Path(folder if is_plain(folder) else "/tmp")


@contextlib.contextmanager
def plain_folder(folder: str) -> Iterator[str]:
    """Yield a safe name of a folder: its own, or a link in a temporary folder.

    An address outside this machine stays as it is.
    """
    if is_plain(folder) or not Path(folder).is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="slipway-", dir=plain_temporary_folder()) as home:
        link = Path(home) / "repository"
        link.symlink_to(Path(folder).resolve())
        yield str(link)
