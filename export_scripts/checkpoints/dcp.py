"""torch's distributed checkpoints: `.metadata` is the index of files of torch.save archives.

megatron-core, FSDP wrappers and torch's trainers save them. Layout: pytorch,
torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.base import Region, StoredTensor
from export_scripts.checkpoints.chunks import (
    ChunkedTensor,
    ChunkedTensors,
    ChunkOffset,
    refuse_holes,
)
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.checkpoints.unpickling import Inert, StorageType, unpickle
from export_scripts.numeric.dtypes import Shape
from foundations.errors import CheckpointMismatchError, listed, refuse
from foundations.files.json_content import Table, is_count

INDEX_NAME = ".metadata"

_MODULE = "torch.distributed.checkpoint.metadata"
# The index; some versions of megatron-core subclass it to add facts about the optimizer.
_METADATA = (
    f"{_MODULE}.Metadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
)
# The location of a chunk, as torch's writer and OLMo-core's write it.
_STORAGE_INFO = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo",
)


class _MalformedIndexError(ValueError):
    """The index holds an object that torch does not write."""


# (name of a tensor or object, offset of a chunk; None for an object)
_Key = tuple[str, ChunkOffset | None]


# The location of a chunk or an object: file, offset and size in bytes.
_Entry = tuple[str, int, int]


@dataclass(frozen=True)
class _Shape:
    """A tensor of the index: type (empty if not supported), shape, and offset -> chunk's shape."""

    dtype: str
    whole: Shape
    chunks: Mapping[ChunkOffset, Shape]


@dataclass(frozen=True)
class ShardedIndex:
    """The index of a distributed checkpoint; tensors are not read."""

    container: Container
    _shapes: Mapping[str, _Shape]
    _entries: Mapping[_Key, _Entry]

    def object(self, name: str) -> Any:
        """Return an object other than a tensor; None if there is none of this name.

        Raises:
            CheckpointMismatchError: Its file is missing, damaged or unsafe.
        """
        entry = self._entries.get((name, None))
        return read_torch_file(_region(self.container, entry, name)) if entry else None

    def tensors(self, wanted: Callable[[str], bool]) -> ChunkedTensors:
        """Return the tensors whose name is wanted.

        Raises:
            CheckpointMismatchError: Files or chunks are missing, truncated or differ from the
                index, or chunks do not make up their tensor.
        """
        container, entries = self.container, self._entries
        index = container.members[INDEX_NAME]
        shapes = {name: shape for name, shape in self._shapes.items() if wanted(name)}
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
        problems += _missing_files(container, [entries[each] for each in places if each in entries])
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
        refuse_holes(tensors, container)
        return tensors


def read_index(container: Container) -> ShardedIndex:
    """Return the index of the distributed checkpoint in an archive or a folder.

    Raises:
        CheckpointMismatchError: It is missing, damaged or unsafe.
    """
    index = container.needed(
        INDEX_NAME, "the index of a distributed checkpoint; copy it again with its hidden files"
    )
    with index.open() as stream:
        tree = unpickle(stream, source=str(index))
    try:
        return ShardedIndex(container, dict(_tensors(tree)), dict(_entries(tree)))
    except (_MalformedIndexError, KeyError, TypeError) as error:
        raise CheckpointMismatchError(
            f"{index} is not the index of a distributed checkpoint: {error}"
        ) from error


def _missing_files(container: Container, entries: Sequence[_Entry]) -> list[str]:
    """Return a problem for each missing or truncated file of the given chunks."""
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


def _state(value: Any, *qualified_names: str) -> Table:
    """Return the attributes of an object, which has one of the given classes."""
    if (
        not isinstance(value, Inert)
        or value.qualified_name not in qualified_names
        or not isinstance(value.state, Mapping)
    ):
        raise _MalformedIndexError(f"{value!r:.80} in place of a {qualified_names[0]}")
    return value.state


def _table(state: Table, key: str) -> Table:
    if not isinstance(state.get(key), Mapping):
        raise _MalformedIndexError(f"{key} is not a table")
    return state[key]  # type: ignore[no-any-return]


def _numbers(value: Any) -> Shape:
    if not isinstance(value, tuple) or not all(map(is_count, value)):
        raise _MalformedIndexError(f"{value!r:.80} in place of sizes")
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
            raise _MalformedIndexError(f"{name!r:.80} in place of a name")
        whole = _numbers(state["size"])
        chunks: dict[ChunkOffset, Shape] = {}
        for chunk in state["chunks"]:
            box = _state(chunk, f"{_MODULE}.ChunkStorageMetadata")
            begin, size = _numbers(box["offsets"]), _numbers(box["sizes"])
            if not len(begin) == len(size) == len(whole):
                raise _MalformedIndexError(f"a chunk of {name} has other axes than the whole")
            if 0 in size and 0 not in whole:
                continue  # a rank that has no part of a small tensor
            if chunks.setdefault(begin, size) != size:
                raise _MalformedIndexError(f"{name} has two chunks at {list(begin)}")
        yield name, _Shape(dtype, whole, chunks)


def _entries(tree: Any) -> Iterator[tuple[_Key, _Entry]]:
    for index, value in _table(_state(tree, *_METADATA), "storage_data").items():
        place = _state(index, f"{_MODULE}.MetadataIndex")
        state = _state(value, *_STORAGE_INFO)
        name, begin = place["fqn"], place.get("offset")
        file = state["relative_path"]
        offset, size = _numbers((state["offset"], state["length"]))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _MalformedIndexError(f"{name!r:.80} is not in a file")
        if state.get("transform_descriptors"):
            raise CheckpointMismatchError(
                f"{file}: {name} is compressed or transformed ({state['transform_descriptors']}), "
                "which is not undone here: load it with torch, and save it without extensions"
            )
        yield (name, None if begin is None else _numbers(begin)), (file, offset, size)
