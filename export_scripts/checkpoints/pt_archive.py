"""The index of a torch.save file: every tensor's byte range, and all other contents as data.

Both the zip layout (torch >= 1.6) and the older stream of pickles are read, in a file or inside an
uncompressed tar. No code of the file is executed and no tensor is loaded.
"""

import functools
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from export_scripts.checkpoints.base import NO_CRC, Record, Region, truncated
from export_scripts.checkpoints.unpickling import Inert, StorageType, unpickle
from export_scripts.numeric.dtypes import SOURCE_TYPES
from foundations.errors import CheckpointMismatchError

# torch/serialization.py
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001

_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_MAX_VALUES = 20_000_000  # in a tree of objects, with shared ones repeated


def read_torch_file(region: Region | Path) -> Any:
    """Return the contents of a torch.save file; its tensors are `StoredTensor` records.

    Objects of known frameworks become plain dicts, lists and values.

    Raises:
        CheckpointMismatchError: The file is damaged, or names an object that no checkpoint needs.
    """
    region = region if isinstance(region, Region) else Region(region)
    with region.open() as stream:
        start = stream.read(9)
        stream.seek(0)
        if start.startswith(_LOCAL_HEADER):
            return _read_zip(region, stream)
        if start[:1] == b"\x80":
            return _read_legacy(region, stream)
    remedy = "if it is a Git LFS pointer or an unfinished download, fetch it again"
    if start.endswith(b"{"):  # torch's FileSystemWriter with SerializationFormat.SAFETENSORS
        remedy = "it holds safetensors that its index does not find: save it in torch's own format"
    raise CheckpointMismatchError(
        f"{region} is not a torch.save file (it starts with {start!r}); {remedy}"
    )


def read_torch_table(region: Region | Path, what: str) -> dict[Any, Any]:
    """Return the table in a torch.save file, as `read_torch_file` does.

    Raises:
        CheckpointMismatchError: The file is damaged or unsafe, or does not hold a table, which the
            message calls `what`.
    """
    tree = read_torch_file(region)
    if not isinstance(tree, dict):
        raise CheckpointMismatchError(f"{region} does not hold {what}")
    return tree


def _read_zip(region: Region, stream: io.BufferedReader) -> Any:
    try:
        with zipfile.ZipFile(stream) as archive:
            members = {info.filename: info for info in archive.infolist()}
            for info in members.values():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise CheckpointMismatchError(
                        f"{region} is refused: member {info.filename} is compressed or encrypted, "
                        "which torch.save never does"
                    )
            prefix = _zip_prefix(members, region)
        order = members.get(f"{prefix}byteorder")
        if order is not None and _member(region, stream, order) != b"little":
            raise CheckpointMismatchError(f"{region} was saved on a big-endian machine")
        data = _member(region, stream, members[f"{prefix}data.pkl"])
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        raise truncated(region.path, f"{region.name or 'the zip archive'}: {error}") from error

    def place(key: str, dtype: str, count: int) -> Record:
        wanted_bytes = count * SOURCE_TYPES[dtype][0]
        info = members.get(f"{prefix}data/{key}")
        if info is None:
            raise truncated(region.path, f"storage {key} is missing")
        if info.file_size < wanted_bytes:
            raise truncated(
                region.path, f"storage {key} has {info.file_size} bytes, needs {wanted_bytes}"
            )
        begin = region.offset + zip_data_offset(region.path, stream, info)
        return Record(region.path, begin, info.file_size, info.CRC)

    return _plain(unpickle(io.BytesIO(data), source=str(region), place=place), region)


def _zip_prefix(members: Mapping[str, zipfile.ZipInfo], region: Region) -> str:
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointMismatchError(
            f"{region} is a zip archive, but not of torch.save: it holds {len(pickles)} data.pkl"
        )
    return pickles[0].removesuffix("data.pkl")


def _member(region: Region, stream: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """Return a stored member's contents, after checking its checksum if it has one."""
    stream.seek(zip_data_offset(region.path, stream, info))
    data = stream.read(info.file_size)
    if info.CRC != NO_CRC and zlib.crc32(data) != info.CRC:
        raise truncated(region.path, f"{info.filename} does not match its checksum")
    return data


def zip_data_offset(path: Path, file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return the offset of a stored zip member's contents in its stream.

    Raises:
        CheckpointMismatchError: The stream does not hold the whole member.
    """
    # The local header repeats the name; its padding may differ in length from the central
    # directory's.
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    if len(header) < _LOCAL_HEADER_BYTES or header[:4] != _LOCAL_HEADER:
        raise truncated(path, f"{info.filename} has no header")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin = info.header_offset + _LOCAL_HEADER_BYTES + int(name_length) + int(extra_length)
    if begin + info.file_size > file.seek(0, io.SEEK_END):
        raise truncated(path, f"{info.filename} ends beyond the file")
    return begin


def _read_legacy(region: Region, stream: io.BufferedReader) -> Any:
    # Storages follow the tree of objects: it is read again after their places are known.
    storages: dict[str, tuple[str, int]] = {}
    places: dict[str, Record] = {}

    def place(key: str, dtype: str, count: int) -> Record:
        storages[key] = dtype, count
        return places.get(key, Record(region.path, region.offset, 0, NO_CRC))

    load = functools.partial(unpickle, stream, source=str(region), place=place)
    if load() != _LEGACY_MAGIC:
        raise CheckpointMismatchError(f"{region} is a pickle, but not of torch.save")
    if load() != _LEGACY_PROTOCOL:
        raise CheckpointMismatchError(f"{region} has an unknown torch.save protocol")
    system = load()
    if isinstance(system, Mapping) and system.get("little_endian") is False:
        raise CheckpointMismatchError(f"{region} was saved on a big-endian machine")
    begin = stream.tell()
    load()
    listed = load()
    if not isinstance(listed, list):
        raise CheckpointMismatchError(f"{region} is a pickle, but not of torch.save")
    keys = [str(key) for key in listed]
    end = stream.tell()
    size = stream.seek(0, io.SEEK_END)
    for key in keys:
        stream.seek(end)
        header = stream.read(8)
        if key not in storages or len(header) < 8:
            raise truncated(region.path, f"storage {key} is missing")
        dtype, wanted = storages[key]
        (count,) = struct.unpack("<q", header)
        size_bytes = count * SOURCE_TYPES[dtype][0]
        places[key] = Record(region.path, region.offset + end + 8, size_bytes, NO_CRC)
        end += 8 + size_bytes
        if count < wanted or end > size:
            raise truncated(region.path, f"storage {key} ends beyond the file")
    for key in storages.keys() - places.keys():
        raise truncated(region.path, f"storage {key} is missing")
    stream.seek(begin)
    return _plain(load(), region)


def _plain(tree: Any, region: Region) -> Any:
    try:
        return _PlainData(region)(tree)
    except RecursionError as error:
        raise CheckpointMismatchError(f"{region} is refused: its objects nest too deep") from error


class _PlainData:
    """Converts an object tree to dicts, lists and values.

    A shared object is converted once, and a cycle ends in None. An object with both attributes and
    slots becomes a list of the two. A tree that is too large with shared objects repeated is
    refused: a walk over it would not terminate.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._done: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # id of a result -> number of values in it

    def __call__(self, value: Any) -> Any:
        """Return `value` as plain data."""
        if isinstance(value, StorageType):
            return value.dtype
        if not isinstance(value, (Inert, Mapping, list, tuple, set, frozenset)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = None
            result = self._done[id(value)] = self._converted(value)
            if isinstance(result, (dict, list)) and id(result) not in self._sizes:
                items = result.values() if isinstance(result, dict) else result
                size = 1 + sum(self._sizes.get(id(item), 1) for item in items)
                self._sizes[id(result)] = size
                if size > _MAX_VALUES:
                    raise CheckpointMismatchError(
                        f"{self._region} is refused: its objects unfold to more than "
                        f"{_MAX_VALUES} values"
                    )
        return self._done[id(value)]

    def _converted(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key if isinstance(key, (str, int)) else repr(key): self(item)
                for key, item in value.items()
            }
        if not isinstance(value, Inert):
            return [self(item) for item in value]
        state = value.state
        if isinstance(state, tuple) and len(state) == 2:  # (attributes, slots), either may be None
            parts = [part for part in state if isinstance(part, Mapping) and part]
            if len(parts) == 2:
                return [self(part) for part in parts]
            state = parts[0] if parts else None
        if value.qualified_name.startswith("omegaconf.") and isinstance(state, Mapping):
            # OmegaConf's containers hold nodes in _content; nodes hold their value in _val.
            return self(state["_content"] if "_content" in state else state.get("_val"))
        attributes = state if isinstance(state, Mapping) else None
        lone = value.args[0] if len(value.args) == 1 else None
        return self(attributes or value.items or value.elements or lone)
