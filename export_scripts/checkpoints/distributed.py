"""Distributed checkpoints of megatron-core: whole tensors in chunks, independent of ranks.

Shared by NeMo and Megatron-LM, whose readers handle the files around it. Layout:
megatron-core, dist_checkpointing/serialization.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.backends import INDEX_NAME, torch_dist_tensors, zarr_tensors
from export_scripts.checkpoints.base import CheckpointReader, json_file
from export_scripts.checkpoints.chunks import ChunkedTensor, concatenated
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.pt_archive import read_torch_file
from export_scripts.errors import CheckpointMismatchError, listed, refuse

METADATA_NAME = "metadata.json"
_COMMON_NAME = "common.pt"
_BACKENDS = {"torch_dist": torch_dist_tensors, "zarr": zarr_tensors}

# Prefixes of a wrapped model's tensors; the optimizer repeats the names after its own prefix.
_WRAPPERS = re.compile(r"^(?:(?:model|module)\.)+")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")

# Layers of equal shapes are stacked into one tensor along its first axis.
_STACKED = re.compile(r"^(.*\blayers)\.(?!\d+\.)(.+)$")
# So are the experts of a layer, in their own order: of every rank that had some.
_EXPERTS = re.compile(r"^(.*\bmlp\.experts)\.experts\.(?!\d+\.)(.+)$")
# megatron-core, transformer/moe/experts.py: one expert's tensor, by its number among all.
_EXPERT = re.compile(r"(\bmlp\.experts)\.experts\.(?=\d+\.)")
_MOST_LAYERS = 10_000

# The halves of a gated projection, which some versions store apart.
_GATE, _LINEAR = "_w", "_v"


def is_distributed(path: Path) -> bool:
    """Return whether a folder holds a distributed checkpoint."""
    return (path / METADATA_NAME).is_file() or (path / INDEX_NAME).is_file()


def read_distributed(container: Container, **facts: Any) -> CheckpointReader:
    """Return the index of the distributed checkpoint that an archive or a folder is.

    Each tensor is one piece, by megatron-core's name without what wrapped the model, layers
    numbered. The configuration is all that it holds other than tensors, such as Megatron-LM's
    arguments. `facts` are fields of the reader.

    Raises:
        CheckpointMismatchError: It is damaged, incomplete or unsafe.
    """
    where = str(container)
    found, common = _BACKENDS[_backend(container)](container, _is_of_model)
    if common is None:
        region = container.needed(_COMMON_NAME, "the description of what was saved")
        common = read_torch_file(region)
    if not isinstance(common, Mapping):
        raise CheckpointMismatchError(f"{where}: {_COMMON_NAME} does not hold a checkpoint")
    tensors = _with_joined_halves(_layers(found, where))
    problems = [f"{name}: {each}" for name, tensor in tensors.items() for each in tensor.problems()]
    refuse(listed(problems, f"{where}: "))
    own = {METADATA_NAME, INDEX_NAME, _COMMON_NAME} & container.members.keys()
    files = {container.members[name].path for name in own}
    files |= {values.path for tensor in tensors.values() for values in tensor.stored}
    return CheckpointReader(
        path=container.path,
        config=common,
        tensors={
            name: tensor.stored if len(tensor.chunks) == 1 else (tensor,)
            for name, tensor in tensors.items()
        },
        files=(container.path,) if container.path.is_file() else tuple(sorted(files)),
        kept=container.kept,
        is_distributed=True,
        **facts,
    )


def _is_of_model(name: str) -> bool:
    return not _OPTIMIZER.match(name) and not name.endswith("._extra_state")


def _backend(container: Container) -> str:
    """Return the backend that `metadata.json` names."""
    name = container.folder + METADATA_NAME
    if METADATA_NAME not in container.members:
        raise CheckpointMismatchError(
            f"{container.path} has {container.folder}{INDEX_NAME} but no {name}: it was saved by "
            "torch.distributed.checkpoint without megatron-core, or not to the end; save it with "
            "--ckpt-format torch_dist"
        )
    backend = json_file(container.members[METADATA_NAME]).get("sharded_backend")
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise CheckpointMismatchError(
            f"{container.path}: {name}: sharded_backend = {backend!r}; known: "
            f"{', '.join(_BACKENDS)}"
        )
    return backend


def _layers(found: Mapping[str, ChunkedTensor], where: str) -> dict[str, ChunkedTensor]:
    """Return the tensors by their logical names, stacked layers and experts separated.

    An expert is named as in a model on one rank, `mlp.experts.local_experts.<number>`.
    """
    tensors: dict[str, ChunkedTensor] = {}
    twice: list[str] = []
    for full_name, tensor in found.items():
        name = _WRAPPERS.sub("", full_name)
        named = {
            _EXPERT.sub(r"\1.local_experts.", expert): values
            for layer, each in _apart(name, tensor, _STACKED, "")
            for expert, values in _apart(layer, each, _EXPERTS, "local_experts.")
        }
        twice += [
            f"{each} is there twice, once in {full_name}" for each in named if each in tensors
        ]
        tensors |= named
    refuse(listed(twice, f"{where}: "))
    return tensors


def _apart(
    name: str, tensor: ChunkedTensor, stacked: re.Pattern[str], kind: str
) -> list[tuple[str, ChunkedTensor]]:
    """Return the entries of a tensor's first axis under names of their own, if it is stacked."""
    match = stacked.match(name)
    if match is None or not tensor.shape or tensor.shape[0] > _MOST_LAYERS:
        return [(name, tensor)]
    return [(f"{match[1]}.{kind}{i}.{match[2]}", tensor.select(i)) for i in range(tensor.shape[0])]


def _with_joined_halves(tensors: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    """Return the tensors with the halves of each gated projection joined, as other formats do."""
    joined = dict(tensors)
    for name, half in tensors.items():
        bare = name.removesuffix(_GATE)
        other = tensors.get(bare + _LINEAR) if name.endswith(_GATE) else None
        if other is not None and (other.dtype, other.shape) == (half.dtype, half.shape):
            joined[bare] = concatenated(joined.pop(name), joined.pop(bare + _LINEAR))
    return joined
