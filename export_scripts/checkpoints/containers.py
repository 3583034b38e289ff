"""The members of an archive or a folder by name, each a byte range of a real file.

An uncompressed tar is read in place. A gzip tar is unpacked once, as one tar, into a scratch
folder. Member names that could leave their folder, links and devices are refused.
"""

from __future__ import annotations

import gzip
import tarfile
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from export_scripts.checkpoints.base import Files, Region, read_small, truncated, yaml_table
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.disk import full_disk
from foundations.files.json_content import Fields
from foundations.files.tree import files_below

_COPY_BYTES = 1 << 22
_GZIP_MAGIC = b"\x1f\x8b"

# Weights barely compress; an archive that unpacks to more than both limits is not a checkpoint.
_BOMB_RATIO = 50
_BOMB_FLOOR_BYTES = 1 << 30


@dataclass(frozen=True)
class Container:
    """The named members of an archive or folder, or of a folder in it."""

    path: Path  # the archive or folder
    members: Files  # normalised relative name -> its byte range
    # Keeps the scratch folder of an unpacked gzip while the container is in use.
    keepalive: tuple[Any, ...] = field(default=(), compare=False)
    folder: str = ""  # the folder in it, with a slash at the end; empty: all of it

    def __str__(self) -> str:
        return f"{self.path}:{self.folder}" if self.folder else str(self.path)

    def within(self, folder: str) -> Container:
        """Return the members of a folder; its name ends with a slash."""
        members = {
            name.removeprefix(folder): region
            for name, region in self.members.items()
            if name.startswith(folder)
        }
        return Container(self.path, members, self.keepalive, self.folder + folder)

    def needed(self, name: str, why: str) -> Region:
        """Return a member.

        Raises:
            CheckpointMismatchError: It is missing; the message ends with `why` it is needed.
        """
        if name not in self.members:
            raise CheckpointMismatchError(f"{self.path} lacks {self.folder}{name}, {why}")
        return self.members[name]


def read_yaml(container: Container, name: str) -> Fields:
    """Return the table in a member.

    Raises:
        CheckpointMismatchError: The member is not YAML, not a table, empty, or too large.
    """
    table = yaml_table(read_small(container.members[name]), source := f"{container.path}: {name}")
    if not table:
        raise CheckpointMismatchError(f"{source} is not a table with entries")
    return table


def open_container(path: Path, *, scratch_dir: Path | None = None) -> Container:
    """Return the members of a tar archive, a gzip tar or a folder.

    A gzip tar is unpacked in `scratch_dir`, by default the system's temporary folder.

    Raises:
        CheckpointMismatchError: The archive is damaged or unsafe.
    """
    if path.is_dir():
        files = {file.relative_to(path).as_posix(): file for file in files_below(path)}
        regions = {name: Region(file, 0, file.stat().st_size) for name, file in files.items()}
        return Container(path, regions)
    if not is_gzip(path):
        return Container(path, _tar_members(path, path))
    scratch = tempfile.TemporaryDirectory(
        prefix=".unpacked-", dir=scratch_dir, ignore_cleanup_errors=True
    )
    plain = Path(scratch.name) / "archive.tar"
    try:
        _gunzip(path, plain)
        return Container(path, _tar_members(plain, path), (scratch,))
    except BaseException:
        scratch.cleanup()
        raise


def _gunzip(path: Path, target: Path) -> None:
    limit = max(_BOMB_FLOOR_BYTES, _BOMB_RATIO * path.stat().st_size)
    written = 0
    try:
        with gzip.open(path, "rb") as source, target.open("wb") as out:
            while chunk := source.read(_COPY_BYTES):
                written += len(chunk)
                if written > limit:
                    raise CheckpointMismatchError(
                        f"{path} is refused: it unpacks to more than {limit} bytes, which no "
                        "checkpoint of its size does (decompression bomb)"
                    )
                out.write(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise truncated(path, f"gzip stream: {error}") from error
    except OSError as error:
        if problem := full_disk(error, target):
            raise ValueError(f"unpacking {path}: {problem}") from error
        raise


def _tar_members(tar: Path, shown: Path) -> Files:
    size = tar.stat().st_size
    members = {}
    problems = []
    try:
        with tarfile.open(tar, "r:") as archive:
            for info in archive:
                if problem := _unsafe(info):
                    problems.append(
                        f"{shown} is refused: member {info.name!r} {problem}; if you trust its "
                        "origin, repack the checkpoint without that member"
                    )
                elif info.isfile():
                    if info.offset_data + info.size > size:
                        raise truncated(shown, f"member {info.name} ends beyond the file")
                    name = PurePosixPath(info.name).as_posix()
                    if name in members:
                        problems.append(f"{shown} is refused: member {name!r} occurs twice")
                    members[name] = Region(tar, info.offset_data, info.size, name)
    except CheckpointMismatchError:
        raise
    except (tarfile.TarError, ValueError) as error:  # ValueError: a bad number in a header
        raise CheckpointMismatchError(
            f"{shown} is not a readable tar archive ({error}); expected a .nemo file"
        ) from error
    refuse(problems)
    tops = {name.partition("/")[0] for name in members}
    if len(tops) == 1 and tops.isdisjoint(members):  # one folder contains them all
        return {name.partition("/")[2]: region for name, region in members.items()}
    return members


def _unsafe(info: tarfile.TarInfo) -> str | None:
    parts = PurePosixPath(info.name).parts
    if info.name.startswith("/") or ".." in parts or "\\" in info.name:
        return "leads outside its folder"
    if info.size < 0:
        return f"has a size of {info.size} bytes"
    if info.issym() or info.islnk():
        return f"is a link to {info.linkname!r}"
    if info.issparse():
        return "is a sparse file"
    if not (info.isfile() or info.isdir()):
        return "is neither a file nor a folder"
    return None


def is_gzip(path: Path) -> bool:
    """Return whether a file begins like a gzip archive."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP_MAGIC
