"""Archives of torch.save, and pickles of torch's objects, written without torch.

Layout: pytorch, torch/serialization.py. All sizes are written in the zip64 form of PKWARE's APPNOTE
6.3, which torch writes for tensors of 4 GiB.
"""

import pickle
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from foundations.files.checksum import crc32

_ALIGNMENT = 64  # of a tensor's values, as in torch
_PADDING_ID = 0x4246
_VERSION = 45  # zip64
_DATE = 0x21  # 1980-01-01, zip's first date
_CRC_FOLLOWS = 8
_IN_ZIP64 = 0xFFFFFFFF


class Global(str):
    """The dotted name of a class, a function or a constant."""


@dataclass(frozen=True, eq=False)
class PickledObject:
    """An object that a pickle builds: a function's result, or an instance with a state."""

    function: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True)
class StoredValues:
    """A reference to the values of a tensor."""

    kind: str  # torch's storage class
    count: int


def pickled(value: Any) -> bytes:
    """Return a pickle of protocol 2, which every release of torch reads."""
    return b"\x80\x02" + b"".join(_opcodes(value)) + b"."


def _opcodes(value: Any) -> Iterator[bytes]:
    if isinstance(value, Global):
        yield "c{}\n{}\n".format(*value.rsplit(".", 1)).encode()
    elif isinstance(value, PickledObject):
        yield from _opcodes(Global(value.function))
        yield from _opcodes(value.arguments)
        if value.state is None:
            yield b"R"
        else:
            yield b"\x81"
            yield from _opcodes(value.state)
            yield b"b"
    elif isinstance(value, StoredValues):
        yield from _opcodes(("storage", Global(value.kind), "0", "cpu", value.count))
        yield b"Q"
    elif isinstance(value, dict):
        yield from (b"}(", *(code for pair in value.items() for code in _all_opcodes(pair)), b"u")
    elif isinstance(value, list):
        yield from (b"](", *_all_opcodes(value), b"e")
    elif isinstance(value, tuple):
        yield from (b"(", *_all_opcodes(value), b"t")
    else:  # without the opcodes of protocol and end
        yield pickle.dumps(value, 2)[2:-1]


def _all_opcodes(values: Iterable[Any]) -> Iterator[bytes]:
    for value in values:
        yield from _opcodes(value)


@dataclass(frozen=True)
class Archive:
    """An archive of one object: a tensor with its values, or an object without tensors."""

    content: Any
    value_bytes: int = 0  # size of the tensor's values
    offset: int = 0  # offset of the archive in its file

    def parts(self, crc: int = 0) -> tuple[bytes, bytes]:
        """Return the bytes before and after the values, whose checksum is `crc`.

        Their sizes do not depend on the checksum.
        """
        files = {"data.pkl": pickled(self.content), "byteorder": b"little", "version": b"3\n"}
        before, directory = b"", b""
        for name, data in files.items():
            local, entry = _member(name, len(data), crc32(data), len(before))
            before, directory = before + local + data, directory + entry
        after = b""
        if self.value_bytes:
            at = len(before)
            begin = self.offset + at + len(_member("data/0", 0, 0, 0, padding=0)[0])
            padding = -begin % _ALIGNMENT
            local, entry = _member("data/0", self.value_bytes, crc, at, padding=padding)
            before, directory = before + local, directory + entry
            after = struct.pack("<4sL2Q", b"PK\7\10", crc, self.value_bytes, self.value_bytes)
        start, count = len(before) + self.value_bytes + len(after), len(files) + bool(after)
        end = struct.pack(
            "<4sQ2H2L4Q4sLQL4s4H2LH",
            b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(directory), start,
            b"PK\6\7", 0, start + len(directory), 1,
            b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_ZIP64, _IN_ZIP64, 0,
        )  # fmt: skip
        return before, after + directory + end


def _member(
    name: str, size: int, crc: int, at: int, *, padding: int | None = None
) -> tuple[bytes, bytes]:
    """Return a member's local header and its entry in the directory.

    With padding, the contents follow the header, and a data descriptor with the checksum follows
    the contents.
    """
    path, sizes = f"archive/{name}".encode(), struct.pack("<2H2Q", 1, 16, size, size)
    facts = (_VERSION, 0 if padding is None else _CRC_FOLLOWS, 0, 0, _DATE)
    extra = sizes
    if padding is not None:
        extra += struct.pack("<2H", _PADDING_ID, padding) + bytes(padding)
    widths = (_IN_ZIP64, _IN_ZIP64, len(path))
    known = crc if padding is None else 0
    local = struct.pack("<4s5H3L2H", b"PK\3\4", *facts, known, *widths, len(extra))
    entry = struct.pack(
        "<4s6H3L5H2L", b"PK\1\2", _VERSION, *facts, crc, *widths, len(sizes), 0, 0, 0, 0, at
    )
    return local + path + extra, entry + path + sizes
