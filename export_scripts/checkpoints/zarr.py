"""The `zarr` backend of megatron-core: a folder for each tensor, a file for each chunk.

Layout: zarr's storage specification, version 2; megatron-core before 0.16,
dist_checkpointing/strategies/zarr.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from export_scripts.checkpoints.base import StoredTensor
from export_scripts.checkpoints.chunks import ChunkedTensor, Place
from export_scripts.checkpoints.containers import Container
from export_scripts.errors import listed, refuse
from export_scripts.files.json_content import json_object
from export_scripts.numeric.dtypes import SOURCE_TYPES

_HEADER_NAME = ".zarray"
_MAX_HEADER_BYTES = 1 << 20
_MOST = 1_000_000

# megatron-core writes bfloat16, which numpy lacks, by name.
_TYPES = {
    "<f8": "fp64", "<f4": "fp32", "<f2": "fp16", "bfloat16": "bf16", "<i8": "int64",
    "<i4": "int32", "<i2": "int16", "|i1": "int8", "|u1": "uint8", "|b1": "bool",
}  # fmt: skip
# Key of a header -> its allowed values; None is an absent key.
_EXPECTED: Mapping[str, tuple[Any, ...]] = {
    "zarr_format": (2,),
    "order": ("C",),
    "compressor": (None,),
    "filters": (None, []),
    "dimension_separator": (".", "/", None),
    "dtype": tuple(_TYPES),
}


def zarr_tensors(container: Container, wanted: Callable[[str], bool]) -> dict[str, ChunkedTensor]:
    """Return the tensors of an archive or a folder whose name is wanted.

    Raises:
        CheckpointMismatchError: Chunks are missing, truncated or compressed.
    """
    end = f"/{_HEADER_NAME}"
    names = [name.removesuffix(end) for name in container.members if name.endswith(end)]
    problems: list[str] = []
    tensors = {
        name: _read(container, f"{name}/", problems) for name in filter(wanted, sorted(names))
    }
    refuse(listed(problems, f"{container.path}: {container.folder}"))
    return tensors


def _read(container: Container, folder: str, problems: list[str]) -> ChunkedTensor:
    """Return an array, without chunks if it has a problem."""
    name = folder + _HEADER_NAME
    try:
        header = json_object(container.read(name, limit_bytes=_MAX_HEADER_BYTES), name)
        found = _oddities(header, name)
    except ValueError as error:
        found = [str(error)]
    if found:
        problems += found
        return ChunkedTensor("fp32", (0,), {})
    dtype, whole, step = _TYPES[header["dtype"]], tuple(header["shape"]), tuple(header["chunks"])
    separator = header.get("dimension_separator") or "."
    full_bytes = math.prod(step) * SOURCE_TYPES[dtype][0]
    # The last chunk of an axis is stored whole and reaches beyond its end.
    stride = tuple(math.prod(step[axis + 1 :]) for axis in range(len(step)))
    chunks: dict[Place, StoredTensor] = {}
    counts = (-(-size // each) for size, each in zip(whole, step, strict=True))
    for place in itertools.product(*map(range, counts)):
        name = folder + (separator.join(map(str, place)) or "0")
        begin = tuple(i * each for i, each in zip(place, step, strict=True))
        shape = tuple(min(c, n - b) for c, n, b in zip(step, whole, begin, strict=True))
        region = container.find(name)
        if region is None:
            problems.append(f"{name} is missing")
        elif region.size != full_bytes:
            problems.append(f"{name} has {region.size} bytes; expected {full_bytes}")
        else:
            own = None if shape == step else stride
            chunks[begin] = StoredTensor(region.path, region.offset, dtype, shape, own)
    return ChunkedTensor(dtype, whole, chunks)


def _oddities(header: Mapping[str, Any], name: str) -> list[str]:
    problems = [
        f"{name}: {key} = {header.get(key)!r}; expected {choices[0]!r}, as megatron-core writes it"
        for key, choices in _EXPECTED.items()
        if header.get(key) not in choices
    ]
    shape, chunk = header.get("shape"), header.get("chunks")
    if not _are_sizes(shape) or not _are_sizes(chunk) or len(shape) != len(chunk):
        problems.append(f"{name}: shape = {shape!r}, chunks = {chunk!r}; expected sizes")
    elif math.prod(-(-size // step) for size, step in zip(shape, chunk, strict=True)) > _MOST:
        problems.append(f"{name}: more than {_MOST} chunks")
    return problems


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
