"""The backends of megatron-core's distributed checkpoints: `torch_dist` and `zarr`.

In the first `.metadata` indexes files of torch.save archives; in the second each tensor has a
folder, and each chunk a file. Layout: pytorch, torch/distributed/checkpoint/metadata.py and
filesystem.py; zarr's storage specification, version 2; megatron-core,
dist_checkpointing/strategies/torch.py and, before 0.16, zarr.py.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from export_scripts.checkpoints.base import Region, StoredTensor, json_table, read_small
from export_scripts.checkpoints.chunks import ChunkedTensor, Place
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.unpickling import Inert, StorageType, unpickle
from export_scripts.errors import CheckpointMismatchError, listed, refuse
from export_scripts.numeric.dtypes import SOURCE_TYPES

INDEX_NAME = ".metadata"
# Newer versions of megatron-core keep the contents of common.pt here.
_COMMON_KEY = "common_state/shard_0_1"

_MODULE = "torch.distributed.checkpoint.metadata"
# The index itself; some versions of megatron-core add notes on the optimizer to it.
_METADATA = (
    f"{_MODULE}.Metadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
)
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"


class _OddIndexError(ValueError):
    """The index holds an object that torch does not write."""


# (name of a tensor or object, where a chunk of it begins; None for an object)
_Key = tuple[str, Place | None]


# The archive of a chunk or an object: its file, its offset and its size there.
_Entry = tuple[str, int, int]


@dataclass(frozen=True)
class _Shape:
    """A tensor of the index: its whole shape, and where its chunks begin -> their shapes.

    The type is empty if it is not supported.
    """

    dtype: str
    whole: tuple[int, ...]
    chunks: Mapping[Place, tuple[int, ...]]


def torch_dist_tensors(
    container: Container, wanted: Callable[[str], bool]
) -> tuple[dict[str, ChunkedTensor], Any]:
    """Return the tensors of an archive or a folder whose name is wanted, and all but tensors.

    The latter is None if common.pt holds it. Chunks are not compared with each other.

    Raises:
        CheckpointMismatchError: The index is missing, damaged or unsafe; files are missing,
            truncated or of other contents.
    """
    index = container.needed(
        INDEX_NAME, "the index of a distributed checkpoint; copy it again with its hidden files"
    )
    with index.open() as stream:
        tree = unpickle(stream, source=str(index))
    try:
        shapes = {name: shape for name, shape in _tensors(tree) if wanted(name)}
        entries = dict(_entries(tree))
    except (_OddIndexError, KeyError, TypeError) as error:
        raise CheckpointMismatchError(
            f"{index} is not the index of a distributed checkpoint: {error}"
        ) from error
    problems = [
        f"{index}: {name} has an unsupported type; save the model in bf16 or fp32"
        for name, shape in shapes.items()
        if not shape.dtype
    ]
    places = [(name, begin) for name, shape in shapes.items() for begin in shape.chunks]
    lost = [(name, begin) for name, begin in places if (name, begin) not in entries]
    problems += listed(
        [f"the chunk of {name} at {list(begin)} is in no file" for name, begin in lost],
        f"{index}: ",
    )
    problems += _lost_files(container, [entries[each] for each in places if each in entries])
    refuse(problems)
    tensors = {}
    for name, shape in shapes.items():
        chunks = {}
        for begin, size in shape.chunks.items():
            region = _region(container, entries[name, begin], name)
            values = chunks[begin] = read_torch_file(region)
            if not isinstance(values, StoredTensor):
                problems.append(f"{region} does not hold a tensor")
            elif (values.shape, values.dtype) != (size, shape.dtype):
                problems.append(
                    f"{region} holds {values.dtype} {list(values.shape)}, its index says "
                    f"{shape.dtype} {list(size)}"
                )
        tensors[name] = ChunkedTensor(shape.dtype, shape.whole, chunks)
    refuse(listed(problems))
    common = entries.get((_COMMON_KEY, None))
    objects = read_torch_file(_region(container, common, _COMMON_KEY)) if common else None
    return tensors, objects[0] if isinstance(objects, list) and len(objects) == 1 else objects


def _lost_files(container: Container, entries: Sequence[_Entry]) -> list[str]:
    """Return the missing and truncated files of some chunks."""
    ends: dict[str, list[int]] = {}
    for file, offset, size in entries:
        ends.setdefault(file, []).append(offset + size)
    problems = []
    for file, inside in sorted(ends.items()):
        region = container.members.get(file)
        if region is None:
            problems.append(
                f"{container.path} lacks {container.folder}{file}, which holds {len(inside)} "
                "chunks of the model"
            )
        elif region.size < max(inside):
            problems.append(
                f"{region} is truncated: it has {region.size} bytes, its chunks end at "
                f"{max(inside)}; copy it again"
            )
    return problems


def _region(container: Container, entry: _Entry, name: str) -> Region:
    file, offset, size = entry
    region = container.needed(file, f"which holds {name}")
    shown = f"{region.name}:{name}" if region.name else name
    return Region(region.path, region.offset + offset, size, shown)


def _state(value: Any, *qualified_names: str) -> Mapping[str, Any]:
    """Return the attributes of an object of the index, of one of the given classes."""
    if (
        not isinstance(value, Inert)
        or value.qualified_name not in qualified_names
        or not isinstance(value.state, Mapping)
    ):
        raise _OddIndexError(f"{value!r:.80} in place of a {qualified_names[0]}")
    return value.state


def _table(state: Mapping[str, Any], key: str) -> Mapping[Any, Any]:
    if not isinstance(state.get(key), Mapping):
        raise _OddIndexError(f"{key} is not a table")
    return state[key]  # type: ignore[no-any-return]


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or any(type(n) is not int or n < 0 for n in value):
        raise _OddIndexError(f"{value!r:.80} in place of sizes")
    return value


def _tensors(tree: Any) -> Iterator[tuple[str, _Shape]]:
    for name, value in _table(_state(tree, *_METADATA), "state_dict_metadata").items():
        if getattr(value, "qualified_name", "") == f"{_MODULE}.BytesStorageMetadata":
            continue
        state = _state(value, f"{_MODULE}.TensorStorageMetadata")
        properties = getattr(state["properties"], "state", None)
        kind = properties[0] if isinstance(properties, tuple) and properties else None
        dtype = kind.dtype if isinstance(kind, StorageType) else ""
        if not isinstance(name, str):
            raise _OddIndexError(f"{name!r:.80} in place of a name")
        whole = _numbers(state["size"])
        chunks: dict[Place, tuple[int, ...]] = {}
        for chunk in state["chunks"]:
            box = _state(chunk, f"{_MODULE}.ChunkStorageMetadata")
            begin, size = _numbers(box["offsets"]), _numbers(box["sizes"])
            if not len(begin) == len(size) == len(whole):
                raise _OddIndexError(f"a chunk of {name} has other axes than the whole")
            if chunks.setdefault(begin, size) != size:
                raise _OddIndexError(f"{name} has two chunks at {list(begin)}")
        yield name, _Shape(dtype, whole, chunks)


def _entries(tree: Any) -> Iterator[tuple[_Key, _Entry]]:
    for index, value in _table(_state(tree, *_METADATA), "storage_data").items():
        place = _state(index, f"{_MODULE}.MetadataIndex")
        state = _state(value, _STORAGE_INFO)
        name, begin = place["fqn"], place.get("offset")
        file = state["relative_path"]
        offset, size = _numbers((state["offset"], state["length"]))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _OddIndexError(f"{name!r:.80} is not in a file")
        if state.get("transform_descriptors"):
            raise _OddIndexError(f"{name} is compressed or otherwise transformed")
        yield (name, None if begin is None else _numbers(begin)), (file, offset, size)


_HEADER_NAME = ".zarray"

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


def zarr_tensors(
    container: Container, wanted: Callable[[str], bool]
) -> tuple[dict[str, ChunkedTensor], None]:
    """Return the tensors of an archive or a folder whose name is wanted; common.pt holds the rest.

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
    return tensors, None


def _read(container: Container, folder: str, problems: list[str]) -> ChunkedTensor:
    """Return an array, without chunks if it has a problem."""
    name = folder + _HEADER_NAME
    try:
        header = json_table(read_small(container.members[name]), name)
        found = _oddities(header, name, len(container.members))
    except CheckpointMismatchError as error:
        found = error.problems
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
        region = container.members.get(name)
        if region is None:
            problems.append(f"{name} is missing")
            break
        if region.size != full_bytes:
            problems.append(f"{name} has {region.size} bytes; expected {full_bytes}")
        else:
            own = None if shape == step else stride
            chunks[begin] = StoredTensor(region.path, region.offset, dtype, shape, own)
    return ChunkedTensor(dtype, whole, chunks)


def _oddities(header: Mapping[str, Any], name: str, files: int) -> list[str]:
    problems = [
        f"{name}: {key} = {header.get(key)!r}; expected {choices[0]!r}, as megatron-core writes it"
        for key, choices in _EXPECTED.items()
        if header.get(key) not in choices
    ]
    shape, chunk = header.get("shape"), header.get("chunks")
    if not _are_sizes(shape) or not _are_sizes(chunk) or len(shape) != len(chunk):
        problems.append(f"{name}: shape = {shape!r:.100}, chunks = {chunk!r:.100}; expected sizes")
        return problems
    count = math.prod(-(-size // step) for size, step in zip(shape, chunk, strict=True))
    if count > files:  # whose names would cost more than the header
        problems.append(f"{name}: more chunks than the checkpoint has files")
    return problems


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
