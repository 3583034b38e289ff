"""The wire format of protocol buffers, without the schema of a message."""

from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_MOST_VARINT_BYTES = 10


class WireFormatError(ValueError):
    """Bytes that are not a message."""


class WireField(NamedTuple):
    """One field of a message: its number, its place, and its value if it is a whole number.

    `content` is the place of the bytes of a text, a list or an inner message.
    """

    number: int
    place: slice
    value: int | None = None
    content: slice | None = None


def wire_fields(data: bytes) -> Iterator[WireField]:
    """Yield the fields of a message; nothing is copied.

    Raises:
        WireFormatError: It is not a message, at the first field that shows it.
    """
    position = 0
    while position < len(data):
        start, value, content = position, None, None
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
        elif kind == _BYTES:
            size, first = _varint(data, position)
            position = first + size
            content = slice(first, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise WireFormatError(f"wire type {kind}")
        if position > len(data):
            raise WireFormatError("a field ends beyond the message")
        yield WireField(tag >> 3, slice(start, position), value, content)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = 0
    for index, byte in enumerate(data[position : position + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), position + index + 1
    raise WireFormatError("a number has no end")
