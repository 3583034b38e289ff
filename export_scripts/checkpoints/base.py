"""The interface of source formats: named tensors as byte ranges of files, read on demand.

Readers hold no tensors. They index a checkpoint without numpy, so that a check on a login node
sees every name and shape; `StoredTensor.load` maps the bytes when a conversion needs them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import mmap
import os
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export_scripts.numeric.dtypes import SOURCE_TYPES, Shape
from foundations.errors import CheckpointMismatchError
from foundations.files.checksum import crc32
from foundations.files.json_content import Fields, Table, json_object

if TYPE_CHECKING:
    from export_scripts.numeric.arrays import Array

_MAX_SMALL_BYTES = 64 << 20  # an index has about a hundred bytes per tensor
_MAX_YAML_BYTES = 1 << 20  # read in about ten seconds
_MAX_VALUES, _MAX_DIGITS = 1_000_000, 400
FLOATING_TYPES = frozenset({"fp64", "fp32", "fp16", "bf16"})


# torch writes it in place of a checksum after torch.serialization.set_crc32_options(False).
NO_CRC = 0
# A checksum is computed in steps of this size, so that a large record does not fill the memory.
_CHECKED_BYTES = 64 << 20
_COMPARED_BYTES = 1 << 18


@dataclass(frozen=True)
class Record:
    """A byte range of a file, with its checksum from the archive."""

    path: Path
    offset: int
    size: int
    crc32: int


class Piece:
    """A training rank's part of a tensor: a `StoredTensor`, or one made of several."""

    dtype: str  # key of SOURCE_TYPES
    shape: Shape

    @property
    def stored(self) -> StoredParts:
        """The stored tensors that it consists of."""
        raise NotImplementedError

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        return math.prod(self.shape) * SOURCE_TYPES[self.dtype][0]

    def load(self, maps: FileMaps) -> Array:
        """Return the values: a read-only view of a file, or an array if gathered or computed."""
        raise NotImplementedError

    def slabs(self, axis: int | None, unit: int = 1) -> Pieces:  # noqa: ARG002
        """Return consecutive parts along an axis that take less memory to gather than the whole.

        The length of each is a multiple of `unit`. Without an axis, the whole is returned.
        """
        return (self,)

    def select(self, index: int) -> Piece:
        """Return the values at `index` of the first axis; nothing is read."""
        raise NotImplementedError

    def rows(self, first: int, end: int) -> Piece:
        """Return the rows from `first` to before `end`; nothing is read."""
        shape = (end - first, *self.shape[1:])
        return ComputedPiece(
            self.dtype, shape, self.stored, lambda maps: self.load(maps)[first:end]
        )

    @property
    def pieces(self) -> Pieces:
        """The whole tensor as one piece."""
        return (self,)


@dataclass(frozen=True)
class StoredTensor(Piece):
    """One tensor stored in a file."""

    path: Path  # file that holds the bytes
    offset: int  # byte offset of the first element in that file
    dtype: str  # key of SOURCE_TYPES
    shape: Shape
    stride: Shape | None = None  # in elements; None: contiguous
    record: Record | None = None  # the record with a checksum that holds it, if there is one

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if self.stride is None or 0 in self.shape:
            return super().span_bytes
        steps = ((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (sum(steps) + 1) * SOURCE_TYPES[self.dtype][0]

    @property
    def stored(self) -> StoredParts:
        """The tensor itself."""
        return (self,)

    def load(self, maps: FileMaps) -> Array:
        """Return the tensor as a read-only view of the mapped file; nothing is copied."""
        import numpy as np

        from export_scripts.numeric.arrays import DTYPES

        dtype = DTYPES[self.dtype]
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        steps = None if self.stride is None else [step * dtype.itemsize for step in self.stride]
        return np.ndarray(self.shape, dtype, maps.map(self.path), self.offset, steps)

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return the rows from `first` to before `end`; nothing is read."""
        step = self.stride[0] if self.stride else math.prod(self.shape[1:])
        offset = self.offset + first * step * SOURCE_TYPES[self.dtype][0]
        return dataclasses.replace(self, offset=offset, shape=(end - first, *self.shape[1:]))

    def select(self, index: int) -> StoredTensor:
        """Return the values at `index` of the first axis; nothing is read."""
        stride = self.stride[1:] if self.stride else None
        row = self.rows(index, index + 1)
        return dataclasses.replace(row, shape=self.shape[1:], stride=stride)


@dataclass(frozen=True)
class ComputedPiece(Piece):
    """Values that are computed from stored tensors."""

    dtype: str
    shape: Shape
    inputs: StoredParts
    compute: Callable[[FileMaps], Array]

    @property
    def stored(self) -> StoredParts:
        """The stored tensors that it is computed from."""
        return self.inputs

    def load(self, maps: FileMaps) -> Array:
        """Return the values, computed in memory."""
        return self.compute(maps)

    def select(self, index: int) -> ComputedPiece:
        """Return the values at `index` of the first axis; loading them computes all."""
        return ComputedPiece(
            self.dtype, self.shape[1:], self.inputs, lambda maps: self.compute(maps)[index]
        )


Pieces = tuple[Piece, ...]  # a tensor's parts, in order of training tensor-parallel rank
Tensors = dict[str, Pieces]  # by name
StoredTensors = dict[str, StoredTensor]
NamedPieces = dict[str, Piece]
ScaledPieces = tuple[Piece, Piece]  # a matrix in FP8 and its scales
StoredParts = tuple[StoredTensor, ...]
Remarks = tuple[str, ...]  # what a user should know about a conversion
IsAllowed = Callable[[str], bool]  # takes a setting's name; whether the user allows to ignore it


def rows_of(pieces: Sequence[Piece]) -> int:
    """Return the number of rows of all pieces."""
    return sum(piece.shape[0] for piece in pieces if piece.shape)


def same_values(first: Sequence[Piece], second: Sequence[Piece], maps: FileMaps) -> bool:
    """Return whether two lists of pieces are known to hold the same values.

    Stored tensors are compared byte by byte, computed ones by their inputs and function.
    """
    if [(type(a), a.shape) for a in first] != [(type(b), b.shape) for b in second]:
        return False
    for a, b in zip(first, second, strict=True):
        if isinstance(a, ComputedPiece):
            if a != b:
                return False
        elif len(a.stored) != len(b.stored) or not all(map(maps.is_same, a.stored, b.stored)):
            return False
    return True


class FileMaps:
    """Read-only memory maps of source files, each opened once. Thread-safe.

    Python keeps a mapped file open. The process's limit of open files, usually 1,024, is therefore
    raised to its maximum: a source can have thousands of files.
    """

    def __init__(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._maps: dict[Path, mmap.mmap] = {}
        self._intact: dict[Record, bool] = {}
        self._record_locks: dict[Record, threading.Lock] = {}
        self._lock = threading.Lock()

    def map(self, path: Path) -> mmap.mmap:
        """Return the map of a whole file.

        Raises:
            OSError: The file cannot be opened.
        """
        with self._lock:
            if path not in self._maps:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[path]

    def is_same(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Return whether two tensors have the same type, shape, strides and bytes."""
        if (one.dtype, one.shape, one.stride) != (other.dtype, other.shape, other.stride):
            return False
        mine, theirs, size = self.map(one.path), self.map(other.path), one.span_bytes
        return all(
            mine[one.offset + at : one.offset + min(at + _COMPARED_BYTES, size)]
            == theirs[other.offset + at : other.offset + min(at + _COMPARED_BYTES, size)]
            for at in range(0, size, _COMPARED_BYTES)
        )

    def is_intact(self, tensor: StoredTensor) -> bool:
        """Return whether a tensor's bytes match the archive's checksum; True without one.

        A record is read once, however many tensors it holds.
        """
        if (record := tensor.record) is None:
            return True
        with self._lock:
            lock = self._record_locks.setdefault(record, threading.Lock())
        with lock:
            if record not in self._intact:
                self._intact[record] = self._crc32(record, tensor) == record.crc32
            return self._intact[record]

    def _crc32(self, record: Record, tensor: StoredTensor) -> int:
        view = memoryview(self.map(record.path))
        found = 0
        for start in range(record.offset, record.offset + record.size, _CHECKED_BYTES):
            end = min(start + _CHECKED_BYTES, record.offset + record.size)
            found = crc32(view[start:end], found)
            if record.size > tensor.span_bytes:  # most of it is not needed now
                self._drop(record.path, start, end)
        return found

    def forget(self, tensor: StoredTensor) -> None:
        """Drop a tensor's pages from this process; the page cache keeps them."""
        self._drop(tensor.path, tensor.offset, tensor.offset + tensor.span_bytes)

    def _drop(self, path: Path, start: int, end: int) -> None:
        mapped = self._maps.get(path)
        page = mmap.PAGESIZE
        first, last = (start + page - 1) // page * page, end // page * page
        if mapped is not None and last > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def prefetch(self, tensor: StoredTensor) -> None:
        """Start reading a tensor's bytes in the background."""
        mapped = self.map(tensor.path)
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if (length := min(tensor.offset + tensor.span_bytes, len(mapped)) - start) > 0:
            mapped.madvise(mmap.MADV_WILLNEED, start, length)


@dataclass(frozen=True)
class Region:
    """A byte range of a file: the whole of it, or a member of a tar."""

    path: Path
    offset: int = 0
    size: int = -1  # -1: to the end
    name: str = ""

    def open(self) -> io.BufferedReader:
        """Return the range as a seekable stream."""
        return io.BufferedReader(_RawRegion(self))

    def read(self) -> bytes:
        """Return the contents."""
        with self.open() as stream:
            return stream.read()

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.name else str(self.path)


class _RawRegion(io.FileIO):
    def __init__(self, region: Region) -> None:
        super().__init__(region.path)
        end = os.fstat(self.fileno()).st_size
        self._start = region.offset
        self._size = end - region.offset if region.size < 0 else region.size
        if region.offset + self._size > end:
            self.close()
            raise truncated(region.path, f"{region.name or 'its contents'} would end at "
                            f"{region.offset + self._size}, the file at {end}")  # fmt: skip
        self._position = 0

    # The methods of FileIO would read beyond the range.
    read = io.RawIOBase.read  # type: ignore[assignment]
    readall, tell = io.RawIOBase.readall, io.RawIOBase.tell

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._position)]
        count = os.preadv(self.fileno(), [view], self._start + self._position)
        self._position += count
        return count


Files = dict[str, Region]  # by name in a folder or an archive


@dataclass(frozen=True)
class CheckpointReader:
    """A source checkpoint: its configuration, and its tensors under logical names.

    Layers are numbered over all pipeline stages; a tensor that training ranks shared has a piece
    per rank.
    """

    format: str  # name of the format, such as huggingface
    path: Path  # the path that was opened
    config: Table  # the model's configuration as the source has it
    # Name -> its pieces in order of training tensor-parallel rank.
    tensors: Mapping[str, Pieces]
    files: tuple[Path, ...]  # every file of the checkpoint
    # The checkpoint's tokenizer files, by their names in the FT folder.
    tokenizer: Files = field(default_factory=dict)
    # Name -> a matrix stored in FP8 (out, in), and its scales (out, groups of inputs).
    fp8: Mapping[str, ScaledPieces] = field(default_factory=dict)
    fp8_group: int = 0  # inputs per scale; 0: all
    remarks: Remarks = ()  # for the report, such as the choice among several files
    # Names in the files of a Hugging Face folder, which may not be those of transformers' family.
    stored_names: frozenset[str] = frozenset()
    keepalive: tuple[Any, ...] = field(default=(), compare=False)  # objects that keep files alive
    # True if tensors are whole, with global layer numbers, not ranks' pieces.
    is_distributed: bool = False
    # The config.json of the model if `config` is another format, and the name of its mapping.
    settings: Table = field(default_factory=dict)
    origin: str = ""
    # The folder of config.json and tokenizer if it is not a folder that transformers can read: the
    # weights are elsewhere, or have another program's names.
    settings_dir: Path | None = None

    @property
    def home(self) -> Path:
        """The folder, or file, that holds the settings and the tokenizer."""
        return self.settings_dir or self.path


def fingerprint_files(files: Sequence[Path]) -> str:
    """Return a digest that changes when a source file is replaced or edited.

    It covers each file's name, size, modification time, and first and last 64 KiB, which hold the
    indices and checksums of torch and safetensors files.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(stat.st_size - (1 << 16), 0), os.SEEK_SET)
            digest.update(file.read(1 << 16))
    return digest.hexdigest()


def truncated(path: Path, what: str) -> CheckpointMismatchError:
    """Return the error for a truncated or damaged file."""
    return CheckpointMismatchError(f"{path} is truncated or damaged: {what}; copy it again")


def read_small(source: Region | Path) -> bytes:
    """Return the contents of a checkpoint's configuration or index.

    Raises:
        CheckpointMismatchError: The file is larger than such files are.
        OSError: The file cannot be read.
    """
    region = source if isinstance(source, Region) else Region(source)
    with region.open() as stream:
        data = stream.read(_MAX_SMALL_BYTES + 1)
    if len(data) > _MAX_SMALL_BYTES:
        raise CheckpointMismatchError(
            f"{region} has more than {_MAX_SMALL_BYTES >> 20} MiB, which no file of its kind has"
        )
    return data


def read_name(path: Path) -> str:
    """Return the name in a file of one line, such as that of a run's last checkpoint."""
    return read_small(path).decode(errors="replace").strip()


def yaml_table(content: bytes, source: object) -> Fields:
    """Return the table in a checkpoint's YAML file; of an empty file, an empty one.

    `source` names the file in messages.

    Raises:
        CheckpointMismatchError: The content is not a table, or is too large.
    """
    import yaml

    try:
        if len(content) > _MAX_YAML_BYTES:
            raise ValueError(f"it has {len(content)} bytes, more than {_MAX_YAML_BYTES}")
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        _count_values(node, {})
        table = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointMismatchError(f"{source} is not YAML: {error}") from error
    except (LookupError, AttributeError) as error:  # PyYAML's, for `!!bool yep`
        raise CheckpointMismatchError(
            f"{source} is not YAML: a value does not fit its tag"
        ) from error
    if not isinstance(table, dict | None):
        raise CheckpointMismatchError(f"{source} is not a table")
    return table or {}


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """Return the number of values in a YAML node after its aliases are expanded."""
    if node is not None and id(node) not in counts:
        counts[id(node)] = _MAX_VALUES  # in case the node contains itself
        count = 1
        if not isinstance(node.value, str):
            inner = (item if isinstance(item, tuple) else (item,) for item in node.value)
            count += sum(_count_values(value, counts) for several in inner for value in several)
        elif len(node.value) > _MAX_DIGITS and node.tag.endswith((":int", ":float")):
            raise ValueError(f"it holds a number of {len(node.value)} characters")
        if count > _MAX_VALUES:
            raise ValueError(f"its aliases unfold to more than {_MAX_VALUES} values")
        counts[id(node)] = count
    return counts.get(id(node), 0)


def last_name(path: Any) -> str:
    """Return the name of a function or class from its import path in a configuration.

    The path is a text, the parts of one, a `_target_` table, or None for an empty name.
    """
    path = path.get("_target_") if isinstance(path, Mapping) else path
    path = path[-1] if isinstance(path, list) else path
    return str(path or "").rpartition(".")[2]


def json_table(content: bytes | str, source: object, *, is_strict: bool = False) -> Fields:
    """Return the object in a checkpoint's JSON text, as `json_object` does.

    Raises:
        CheckpointMismatchError: The text is not an object.
    """
    try:
        return json_object(content, source, is_strict=is_strict)
    except ValueError as error:
        raise CheckpointMismatchError(str(error)) from error


def json_file(source: Region | Path) -> Fields:
    """Return the object in a checkpoint's JSON file.

    Raises:
        CheckpointMismatchError: The file is not an object, is far too large, or cannot be read.
    """
    try:
        return json_table(read_small(source), source)
    except OSError as error:
        raise CheckpointMismatchError(f"{source} cannot be read: {error.strerror}") from error
