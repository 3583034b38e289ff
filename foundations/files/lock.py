"""An exclusive lock on a folder among the processes that share its disk."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_TAKEN = (errno.EAGAIN, errno.EACCES)
# Some cluster file systems are mounted without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def folder_lock(path: Path, busy: str) -> Iterator[bool]:
    """Hold a lock, the file `path`, that the system releases when the process ends.

    Yields False on a file system without locks, where other processes are not kept out. Afterwards
    the lock file is deleted, with the folders created for it that are still empty.

    Raises:
        ValueError: Another process holds the lock (the message begins with `busy`), or `path` is a
            symbolic link, whose target would be emptied.
    """
    created = [folder for folder in path.parents if not folder.exists()]
    fd, is_held = _opened(path, busy)
    with suppress(OSError):  # on a full disk, the lock holds without the process's ID
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    try:
        yield is_held
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in created:
                folder.rmdir()
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock `path`; nothing is written.

    A lock that cannot be read is not held, as far as this process knows.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(fd)
    return False


def _opened(path: Path, busy: str) -> tuple[int, bool]:
    """Return the descriptor of the lock file, and whether it is locked."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # a failed run deleted its folder
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ValueError(f"{path} is a link, and a lock is a file; remove it") from None
        with ExitStack() as on_failure:
            on_failure.callback(os.close, fd)
            is_held = _locked(fd, busy)
            # Its last holder may have deleted the file between opening and locking.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    on_failure.pop_all()
                    return fd, is_held


def _locked(fd: int, busy: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        if error.errno not in _TAKEN:
            raise
        owner = os.read(fd, 64).decode(errors="replace").strip()
        process = f" (process {owner})" if owner else ""
        raise ValueError(f"{busy}{process}; wait for it, or stop it") from None
    return True
