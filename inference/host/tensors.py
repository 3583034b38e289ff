"""Tensors of requests and responses: types, bytes and shapes as KServe's protocol has them."""

import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.backend.requests import Array, RawTensor
from inference.front.rules import InferError
from inference.front.validation import DATATYPES

_NAMES = {np.dtype(kind): name for name, kind in DATATYPES.items() if name != "BF16"}
_SIZES = {"BF16": 2} | {
    name: np.dtype(kind).itemsize
    for name, kind in DATATYPES.items()
    if name not in ("BF16", "BYTES")
}
_AT_ONCE = 1 << 10  # elements, which take a millisecond or two
_LENGTH = struct.Struct("<I")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def array_of(raw: bytes | memoryview, datatype: str, shape: Sequence[int], *, name: str) -> Array:
    """Return the tensor in the bytes of a request. Raises InferError for another number of them."""
    count = math.prod(shape)
    if datatype == "BYTES":
        return _texts_of(raw, count, name).reshape(shape)
    if len(raw) != count * _SIZES[datatype]:
        raise InferError(
            f"input byte size mismatch for input {name}. Expected {count * _SIZES[datatype]}, got "
            f"{len(raw)}"
        )
    if datatype == "BF16":  # the upper half of an FP32
        return (
            (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        )
    return np.frombuffer(raw, DATATYPES[datatype]).reshape(shape)


def _texts_of(raw: bytes | memoryview, count: int, name: str) -> Array:
    """Return `count` texts, each after its length in four bytes."""
    texts, at = np.empty(count, np.object_), 0
    for number in range(count):
        start = at + _LENGTH.size
        if start > len(raw) or (at := start + _LENGTH.unpack_from(raw, at)[0]) > len(raw):
            raise InferError(f"input {name} has {number} texts in its bytes, expected {count}")
        texts[number] = bytes(raw[start:at])
    if at != len(raw):
        raise InferError(f"input {name} has more bytes than {count} texts")
    return texts


def datatype_of(value: Array | RawTensor) -> str:
    """Return KServe's name of the type of an output."""
    return value.datatype if isinstance(value, RawTensor) else _NAMES[value.dtype]


def raw_of(value: Array | RawTensor) -> bytes:
    """Return the bytes of an output."""
    if isinstance(value, RawTensor):
        return value.raw
    if value.dtype != np.object_:
        return value.tobytes()
    texts = [each if isinstance(each, bytes) else str(each).encode() for each in value.reshape(-1)]
    return b"".join(part for text in texts for part in (_LENGTH.pack(len(text)), text))


def as_array(value: Array | RawTensor) -> Array:
    """Return an output as an array."""
    if isinstance(value, RawTensor):
        return array_of(value.raw, value.datatype, value.shape, name="output")
    return value


def json_elements(value: Any) -> bytes:
    """Return the elements of an output in JSON, with commas between them.

    A number takes more than a microsecond. They are written a piece at a time, between which other
    threads run.
    """
    flat = as_array(value).reshape(-1)
    pieces = (flat[at : at + _AT_ONCE] for at in range(0, len(flat), _AT_ONCE))
    return b",".join(compact_json(_values(piece))[1:-1] for piece in pieces)


def compact_json(value: Any) -> bytes:
    """Return a value in JSON without spaces."""
    return _encode(value).encode(errors="replace")


def _values(flat: Array) -> list[Any]:
    if flat.dtype == np.object_:
        return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in flat]
    return list(flat.tolist())
