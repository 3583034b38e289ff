"""System calls for large files: fast writes, one sync, and clear errors for a full disk."""

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Direct writes need memory, offsets and lengths in multiples of the disk's block; this suits every
# disk.
BLOCK_BYTES = 4096
# Below this size, neither these calls nor a background thread pay off.
LARGE_BYTES = 1 << 20
_TEMPORARY_SUFFIX = ".writing"
_O_DIRECT = os.O_DIRECT

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FREE_BYTES = 1 << 20  # a disk with more than this has space for any small file

_libc = ctypes.CDLL(None, use_errno=True)


class SequentialFile:
    """A file written once, from start to end, at disk speed; under a temporary name until complete.

    Space is allocated first, which makes writes several times cheaper, and whole blocks from
    aligned memory bypass the page cache: no copy, and no dirty pages to write back at the end. A
    file system that supports neither gets plain writes. A file at `path` is replaced, and its
    folder is created.

    Raises:
        OSError: The file cannot be written; every method raises it, and it names the file.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size = path, size_bytes
        self._temporary = path.with_name(path.name + _TEMPORARY_SUFFIX)
        self._written_bytes = 0
        self._fd = -1
        self._direct = False
        with self._closed_on_failure():
            path.parent.mkdir(exist_ok=True, parents=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._temporary, flags, 0o666)
            if size_bytes >= LARGE_BYTES:
                # Where the file system cannot allocate, the C library's posix_fallocate would write
                # into every block; the system call fails, and the file is written without it.
                failed = _libc.fallocate(self._fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
                if failed and (number := ctypes.get_errno()) in _FULL:
                    raise OSError(number, os.strerror(number))
                self._set_direct(True)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the file after an error, and name it in the error."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                error.filename = str(self._path)
            raise

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | (_O_DIRECT if wanted else 0))
        except OSError:  # a file system without direct writes
            wanted = False
        self._direct = wanted and _O_DIRECT != 0

    def write(self, chunk: memoryview) -> None:
        """Append a chunk; blocks are written directly until a chunk does not end on a block."""
        with self._closed_on_failure():
            blocks = len(chunk) // BLOCK_BYTES * BLOCK_BYTES
            done = 0
            while self._direct and done < blocks:
                try:
                    done += os.write(self._fd, chunk[done:blocks])
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    break  # the disk needs another alignment of memory or offset
                if done % BLOCK_BYTES:
                    break
            if done < len(chunk) and self._direct:
                self._set_direct(False)
            while done < len(chunk):
                done += os.write(self._fd, chunk[done:])
            self._written_bytes += done

    def finish(self) -> None:
        """Close the complete file and give it its name."""
        with self._closed_on_failure():
            self.close()  # some file systems report a failed write only here
            written = self._written_bytes
            assert written == self._size, f"{self._path}: wrote {written} of {self._size} bytes"
            self._temporary.rename(self._path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def nearest_existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def folder_problem(folder: Path) -> str | None:
    """Return why no file can be created in a folder, or if it does not exist, above it."""
    there = nearest_existing(folder)
    if not there.is_dir():
        return f"{there} is not a folder"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there} cannot be written to ({error.strerror})"
    return None


def full_disk(error: OSError, nearby: Path) -> str | None:
    """Return which disk is full and what to do; None for any other error.

    `nearby` is the likely path of an error that names no file; a disk with free space is not named.
    """
    if error.errno not in _FULL:
        return None
    path = nearby if error.filename is None else Path(os.fsdecode(error.filename))
    there = nearest_existing(path.resolve())
    mount = next(each for each in (there, *there.parents) if each.is_mount())
    free = shutil.disk_usage(there).free
    if error.filename is None and free > _FREE_BYTES:
        return f"a disk is full ({error.strerror}); see `df` and `df -i`, free space, and run again"
    full = "is full" if error.errno == errno.ENOSPC else "has no more room for this user (quota)"
    return (
        f"the disk mounted at {mount} {full}: {path} cannot be written, {free:,} bytes are free; "
        "free space there, or choose a folder on another disk, and run again: what is finished is "
        "kept"
    )


def check_space(folder: Path, needed_bytes: int) -> str | None:
    """Return a problem if the disk of a folder has less than `needed_bytes` free."""
    free = shutil.disk_usage(nearest_existing(folder.resolve())).free
    if free >= needed_bytes:
        return None
    return (
        f"{folder} has {free:,} bytes free, the conversion needs {needed_bytes:,}; free space or "
        "choose another folder"
    )


def sync_file_system(folder: Path) -> None:
    """Flush everything written to the folder's file system, in one call.

    Raises:
        OSError: Something could not be written.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, after a rename in it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
