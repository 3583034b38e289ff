"""The wire format of protocol buffers, read without a message's schema."""

from collections.abc import Iterator

_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
_MAX_VARINT_BYTES = 10


def wire_fields(data: bytes) -> Iterator[tuple[int, slice, slice | None]]:
    """Yield each field of a message: its number, its position, and its content's position.

    The content is that of a string, packed list or nested message; it is None for numbers. Nothing
    is copied. Raises ValueError at the first malformed field.
    """
    position = 0
    while position < len(data):
        start, content = position, None
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _BYTES:
            size, first = _varint(data, position)
            position = first + size
            content = slice(first, position)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"wire type {kind}")
        if position > len(data):
            raise ValueError("a field ends beyond the message")
        yield tag >> 3, slice(start, position), content


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), position + index + 1
    raise ValueError("a number has no end")
