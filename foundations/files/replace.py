"""Files replaced in one step: a reader sees the old contents or the new ones, never a part."""

import errno
import os
import stat
import uuid
from pathlib import Path

_LARGEST_BYTES = 64 << 20  # a state file has a few kB for each job or checkpoint


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the content of `path` (text as UTF-8) atomically, by a hidden file next to it.

    Raises:
        OSError: The file cannot be written; `path` is unchanged.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)  # a failed write does not name its file
        raise
    finally:
        partial.unlink(missing_ok=True)


def read_file(path: Path, *, retries: int = 3) -> bytes:
    """Return the contents of a state file.

    A pipe, which may never end, and a file that would fill the memory are refused. On NFS, a file
    that another machine replaces before it is read is stale, and is opened again.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, or is larger than 64 MiB.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_size > _LARGEST_BYTES:
            raise ValueError(f"it has {found.st_size} bytes, of {_LARGEST_BYTES} at most")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError as error:
        error.filename = str(path)  # a failed read does not name its file
        if error.errno != errno.ESTALE or not retries:
            raise
    finally:
        os.close(descriptor)
    return read_file(path, retries=retries - 1)
