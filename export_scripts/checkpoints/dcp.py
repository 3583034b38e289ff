"""The `torch_dist` backend of megatron-core: `.metadata` indexes files of torch.save archives.

Layout: pytorch, torch/distributed/checkpoint/metadata.py and filesystem.py; megatron-core,
dist_checkpointing/strategies/torch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.base import Region, StoredTensor
from export_scripts.checkpoints.chunks import ChunkedTensor
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.unpickling import Inert, StorageType, unpickle
from export_scripts.errors import CheckpointMismatchError, listed, refuse

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
_Place = tuple[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Entry:
    """The location of the archive of a chunk or an object."""

    file: str
    offset: int
    size: int


@dataclass(frozen=True)
class _Shape:
    """A tensor of the index: its whole shape, and where its chunks begin -> their shapes.

    The type is empty if it is not supported.
    """

    dtype: str
    whole: tuple[int, ...]
    chunks: Mapping[tuple[int, ...], tuple[int, ...]]


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
    held: dict[str, list[_Entry]] = {}
    for entry in entries:
        held.setdefault(entry.file, []).append(entry)
    problems = []
    for file, inside in sorted(held.items()):
        region = container.find(file)
        end = max(entry.offset + entry.size for entry in inside)
        if region is None:
            problems.append(
                f"{container.path} lacks {container.folder}{file}, which holds {len(inside)} "
                "chunks of the model"
            )
        elif region.size < end:
            problems.append(
                f"{region} is truncated: it has {region.size} bytes, its chunks end at {end}; "
                "copy it again"
            )
    return problems


def _region(container: Container, entry: _Entry, name: str) -> Region:
    file = container.needed(entry.file, f"which holds {name}")
    shown = f"{file.name}:{name}" if file.name else name
    return Region(file.path, file.offset + entry.offset, entry.size, shown)


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
        chunks: dict[tuple[int, ...], tuple[int, ...]] = {}
        for chunk in state["chunks"]:
            box = _state(chunk, f"{_MODULE}.ChunkStorageMetadata")
            begin, size = _numbers(box["offsets"]), _numbers(box["sizes"])
            if not len(begin) == len(size) == len(whole):
                raise _OddIndexError(f"a chunk of {name} has other axes than the whole")
            if chunks.setdefault(begin, size) != size:
                raise _OddIndexError(f"{name} has two chunks at {list(begin)}")
        yield name, _Shape(dtype, whole, chunks)


def _entries(tree: Any) -> Iterator[tuple[_Place, _Entry]]:
    for index, value in _table(_state(tree, *_METADATA), "storage_data").items():
        place = _state(index, f"{_MODULE}.MetadataIndex")
        state = _state(value, _STORAGE_INFO)
        name, begin = place["fqn"], place.get("offset")
        file, numbers = state["relative_path"], _numbers((state["offset"], state["length"]))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _OddIndexError(f"{name!r:.80} is not in a file")
        if state.get("transform_descriptors"):
            raise _OddIndexError(f"{name} is compressed or otherwise transformed")
        yield (name, None if begin is None else _numbers(begin)), _Entry(file, *numbers)
