"""An exclusive lock on one folder's name among the processes that share its disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_TAKEN = (errno.EAGAIN, errno.EACCES)
# Some cluster file systems are mounted without locks.
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderLock:
    """A lock that the system releases when the process ends.

    Args:
        path: The lock's file.
        busy: What to say where another process holds it.

    Attributes:
        held: False on a file system without locks, where others are not kept away.
    """

    def __init__(self, path: Path, busy: str) -> None:
        self._path = path
        self._busy = busy
        self._fd = -1
        self._made: list[Path] = []
        self.held = True

    def __enter__(self) -> FolderLock:
        """Take the lock.

        Raises:
            ValueError: Another process holds it, or it is a link, whose target would be emptied.
        """
        folder = self._path.parent
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                fd = os.open(self._path, flags, 0o666)
            except FileNotFoundError:  # a failed run removed the folder it had made
                continue
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise ValueError(
                    f"{self._path} is a link, and a lock is a file; remove it"
                ) from None
            try:
                self._lock(fd)
                # The file may have been removed by its last holder between opening and locking.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), self._path.lstat()):
                        self._fd = fd
                        break
            finally:
                if self._fd != fd:
                    os.close(fd)
        with contextlib.suppress(OSError):  # of a full disk: the lock holds without a number
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        return self

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                self.held = False
                return
            if error.errno not in _TAKEN:
                raise
            owner = os.read(fd, 64).decode(errors="replace").strip()
            process = f" (process {owner})" if owner else ""
            raise ValueError(f"{self._busy}{process}; wait for it, or stop it") from None

    def __exit__(self, *_: object) -> None:
        """Release the lock; remove its file and the folders made for it that are still empty."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()
        os.close(self._fd)
        self._fd = -1
