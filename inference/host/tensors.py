"""Encoding and decoding of tensors in KServe's protocol: types, bytes and JSON."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic_core import to_json

from inference.backend.requests import Array
from inference.front.rules import InferError
from inference.front.validation import DATATYPES

DATATYPE_NAMES = {kind: name for name, kind in DATATYPES.items()}
_AT_ONCE = 1 << 12  # elements to encode in one piece, which takes a millisecond or two
_LENGTH = struct.Struct("<I")
_CODES = {"input": "INVALID_ARGUMENT", "output": "INTERNAL"}


def array_of(
    raw: bytes | memoryview, datatype: str, shape: Sequence[int], *, name: str, kind: str = "input"
) -> Array:
    """Return the tensor in `raw`, an "input" or "output" by `kind`.

    Raises InferError if the number of bytes does not fit.
    """
    count, dtype = math.prod(shape), DATATYPES[datatype]
    try:
        if datatype == "BYTES":
            return _texts_of(raw, count).reshape(shape)
        if len(raw) == (size := count * dtype.itemsize):
            return np.frombuffer(raw, dtype).reshape(shape)
        reason = f"{kind} byte size mismatch for {kind} {name}. Expected {size}, got {len(raw)}"
    except ValueError as error:
        reason = f"{kind} {name} has {error}"
    raise InferError(reason, _CODES[kind])


def _texts_of(raw: bytes | memoryview, count: int) -> Array:
    """Return (count,) texts; each is preceded by its length in four bytes. Raises ValueError."""
    texts, at = np.empty(count, np.object_), 0
    for number in range(count):
        start = at + _LENGTH.size
        if start > len(raw) or (at := start + _LENGTH.unpack_from(raw, at)[0]) > len(raw):
            raise ValueError(f"{number} texts in its bytes, expected {count}")
        texts[number] = bytes(raw[start:at])
    if at != len(raw):
        raise ValueError(f"more bytes than {count} texts")
    return texts


def raw_of(value: Array) -> bytes:
    """Return the bytes of a tensor in KServe's binary format."""
    if value.dtype != np.object_:
        return value.tobytes()
    flat = value.reshape(-1)
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in flat]
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def json_elements(value: Array) -> bytes:
    """Return the elements of an output in JSON, separated by commas.

    It encodes in pieces, so that other threads can run in between.
    """
    flat = value.reshape(-1)
    pieces = (flat[at : at + _AT_ONCE] for at in range(0, len(flat), _AT_ONCE))
    return b",".join(compact_json(_values(piece))[1:-1] for piece in pieces)


def compact_json(value: Any) -> bytes:
    """Return a value as JSON without spaces; NaN and Infinity are written as such."""
    return to_json(value, inf_nan_mode="constants")


def _values(flat: Array) -> list[Any]:
    if flat.dtype == np.object_:
        return [text.decode(errors="replace") if isinstance(text, bytes) else text for text in flat]
    values: list[Any] = flat.tolist()
    return values
