"""The tensors of a safetensors file; its header is checked as the library checks it."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from export_scripts.checkpoints.base import StoredTensor, json_table, truncated
from export_scripts.errors import CheckpointMismatchError, listed, refuse
from export_scripts.numeric.dtypes import SOURCE_TYPES

_SAFETENSORS_TYPES = {
    "F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_MOST_AXES, _MOST_BYTES = 32, 1 << 62
_GIT_LFS = b"version https://git-lfs"


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        CheckpointMismatchError: The file is truncated, or its header disagrees with it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_GIT_LFS)) == _GIT_LFS:
            raise CheckpointMismatchError(
                f"{path} is a Git LFS pointer and not the weights: fetch them with git lfs pull"
            )
        file.seek(0)
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise truncated(path, f"its header would have {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = json_table(text.decode(), f"{path}: its header", is_strict=True)
    except UnicodeDecodeError as error:
        raise truncated(path, "its header is not a text in UTF-8") from error
    facts = header.pop("__metadata__", {})
    problems: list[str] = []
    if not isinstance(facts, dict) or not all(isinstance(each, str) for each in facts.values()):
        problems.append("__metadata__ of its header is not a table of texts")
    found = {
        key: tensor
        for key, entry in header.items()
        if (tensor := _entry(path, key, entry, 8 + length, problems))
    }
    refuse(listed(problems, f"{path}: "))
    _check_cover(path, found, 8 + length, size)
    return found, facts


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], begin: int, size: int) -> None:
    """Check that the tensors fill the file from `begin` on: no bytes lost or added."""
    end = begin
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].span_bytes))
    for key, tensor in in_order:
        if tensor.offset != end:
            raise truncated(path, f"tensor {key} begins at byte {tensor.offset}, expected {end}")
        end += tensor.span_bytes
    if end != size:
        raise truncated(path, f"its tensors end at byte {end}, the file at {size}")


def _entry(path: Path, key: str, entry: Any, base: int, problems: list[str]) -> StoredTensor | None:
    """Return the tensor of an entry of the header; `base` is where the tensors begin."""
    kind, shape, offsets = (
        entry.get(name) if isinstance(entry, dict) else None
        for name in ("dtype", "shape", "data_offsets")
    )
    if not are_sizes(shape) or not are_sizes(offsets) or len(offsets) != 2:
        problems.append(
            f"tensor {key} has shape = {shape!r:.100} and data_offsets = {offsets!r:.100}; "
            "expected lists of whole numbers: copy the file again"
        )
        return None
    if not isinstance(kind, str) or kind not in _SAFETENSORS_TYPES:
        problems.append(
            f"tensor {key} is stored as {kind!r:.100}; known types: "
            f"{', '.join(_SAFETENSORS_TYPES)} (convert the unquantised checkpoint)"
        )
        return None
    begin, end = offsets
    tensor = StoredTensor(path, base + begin, _SAFETENSORS_TYPES[kind], tuple(shape))
    if end - begin == tensor.span_bytes:
        return tensor
    problems.append(
        f"tensor {key} of shape {shape!r:.100} and type {kind} ({SOURCE_TYPES[tensor.dtype][0]} "
        f"bytes a value) cannot take {end - begin} bytes: copy the file again"
    )
    return None


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether a value of a header is a list of sizes or of places."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_AXES
        and all(type(size) is int and 0 <= size < _MOST_BYTES for size in value)
    )
