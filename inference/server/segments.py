"""A server's shared memory: segments with a prefix of its own, removed at its end."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from inference.system.private_folder import abandoned_paths, held_path

SHM_FOLDER = Path("/dev/shm")
_LOCK_SUFFIX = ".lock"


@contextlib.contextmanager
def shared_memory_of(prefix: str) -> Iterator[None]:
    """Reserve a prefix of names in /dev/shm; remove its segments when the block ends.

    A locked file marks the prefix as in use; the lock ends with the process. Segments left behind
    by this user's killed servers are removed first.
    """
    if not prefix or not SHM_FOLDER.is_dir():
        yield
        return
    held, path = held_path(lambda: SHM_FOLDER / f"{prefix}{_LOCK_SUFFIX}", os.O_CREAT | os.O_RDWR)
    try:
        locks = SHM_FOLDER.glob(f"{user_prefix()}*{_LOCK_SUFFIX}")
        for stale in abandoned_paths(locks, os.O_RDWR):
            _remove_segments(stale.name.removesuffix(_LOCK_SUFFIX))
            with contextlib.suppress(OSError):
                stale.unlink()
        yield
    finally:
        _remove_segments(prefix)
        path.unlink(missing_ok=True)
        os.close(held)


def user_prefix() -> str:
    """Return the common prefix of this user's segments."""
    return f"slipway-{os.getuid()}-"


def close_segments(prefix: str) -> None:
    """Remove other users' access to the segments with a prefix.

    The Python backend makes them world-readable, whatever the umask, and all requests and answers
    pass through them.
    """
    for path in SHM_FOLDER.glob(f"{prefix}*") if prefix else ():
        with contextlib.suppress(OSError):
            state = path.lstat()
            is_own_file = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
            if is_own_file and state.st_mode & 0o077:
                path.chmod(0o600)


def _remove_segments(prefix: str) -> None:
    for path in SHM_FOLDER.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.suffix != _LOCK_SUFFIX and path.lstat().st_uid == os.getuid():
                path.unlink()
