"""Distributed checkpoints of Megatron-style models: whole tensors in chunks, independent of ranks.

Shared by the readers of NeMo and Megatron-LM, which handle the files around it. Layout:
megatron-core, dist_checkpointing/serialization.py, and transformer/fsdp_dtensor_checkpoint.py for
those of Megatron-FSDP, which torch saves.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from export_scripts.checkpoints.base import FLOATING_TYPES, CheckpointReader, json_file
from export_scripts.checkpoints.chunks import ChunkedTensor, ChunkedTensors, concatenated
from export_scripts.checkpoints.containers import Container
from export_scripts.checkpoints.dcp import INDEX_NAME, ShardedIndex, read_index
from export_scripts.checkpoints.partitioned import bare_name
from export_scripts.checkpoints.pt_archive import read_torch_file
from foundations.errors import CheckpointMismatchError, refuse
from foundations.files.json_content import Table, nested, without_nulls

METADATA_NAME = "metadata.json"
COMMON_NAME = "common.pt"
# Newer versions of megatron-core keep the contents of common.pt here.
COMMON_KEY = "common_state/shard_0_1"
# Objects that fsdp_dtensor and torch_dcp save one by one.
_ARGUMENTS = "args"
_COMMON_OBJECTS = (_ARGUMENTS, "checkpoint_version")
BACKEND = "torch_dist"
CORE_TABLE = "embedding.word_embeddings.weight"  # every model of megatron-core has it

# Names that are not the model's: the optimizer's, which repeat the model's after a prefix, and
# Composer's random states and metrics.
_TRAINING = re.compile(
    r"^(?:(?:app|state|dcp)\.)?(?:chained_\d+\.)?(?:optimizers?|optim)(?:_\w+)?\."
    r"|^(?:state\.)?(?:rng|train_metrics|eval_metrics)\.|\._extra_state$"
)
# Prefixes of a model's tensors, from the saved state and from wrappers of the model.
_WRAPPERS = re.compile(r"^(?:(?:app|state|dcp|model_state|state_dict|model|module)\.)+")

# Layers of equal shapes are stacked in one tensor along its first axis.
_STACKED = re.compile(r"^(.*\blayers)\.(?!\d+\.)(.+)$")
# So are the experts of a layer, from all ranks, in order.
_EXPERTS = re.compile(r"^(.*\bmlp\.experts)\.experts\.(?!\d+\.)(.+)$")
# An expert's tensor, by its number among all: megatron-core, transformer/moe/experts.py.
_EXPERT = re.compile(r"(\bmlp\.experts)\.experts\.(?=\d+\.)")
_MAX_LAYERS = 10_000

_Value = TypeVar("_Value")

# Suffixes of the halves of a gated projection, which some versions store apart.
_GATE, _LINEAR = "_w", "_v"


def is_distributed(path: Path) -> bool:
    """Return whether a folder holds a distributed checkpoint."""
    return (path / METADATA_NAME).is_file() or (path / INDEX_NAME).is_file()


def read_distributed(container: Container, **facts: Any) -> CheckpointReader:
    """Return the index of a distributed checkpoint in an archive or a folder.

    Each tensor is one piece under megatron-core's name, without wrappers' prefixes, layers
    numbered. The configuration is everything other than tensors, such as Megatron-LM's arguments.
    `facts` are further fields of the reader.

    Raises:
        CheckpointMismatchError: The checkpoint is damaged, incomplete or unsafe.
    """
    _check_backend(container)
    index = read_index(container)
    common = _common(container, index)
    tensors = model_tensors(index)
    own = {METADATA_NAME, INDEX_NAME, COMMON_NAME} & container.members.keys()
    files = {container.members[name].path for name in own}
    files |= {values.path for tensor in tensors.values() for values in tensor.stored}
    return CheckpointReader(
        path=container.path,
        config=common,
        tensors={name: tensor.pieces for name, tensor in tensors.items()},
        files=(container.path,) if container.path.is_file() else tuple(sorted(files)),
        keepalive=container.keepalive,
        is_distributed=True,
        **facts,
    )


def model_tensors(index: ShardedIndex) -> ChunkedTensors:
    """Return the model's tensors of an index by their names in the model.

    Stacked layers and experts are separated; the halves of gated projections are joined.

    Raises:
        CheckpointMismatchError: Tensors are missing or damaged, or two have the same name.
    """
    found = {
        name: tensor
        for name, tensor in index.tensors(lambda name: not _TRAINING.search(name)).items()
        if tensor.shape or tensor.dtype in FLOATING_TYPES  # an integer scalar counts steps
    }
    where = str(index.container)
    return _with_joined_halves(_layers(without_prefixes(found, where), where))


def without_prefixes(found: Mapping[str, _Value], where: object) -> dict[str, _Value]:
    """Return a table by tensor name without the prefixes of the saved state and of wrappers.

    Raises:
        CheckpointMismatchError: Two tensors have the same name without them.
    """
    names = {name: _WRAPPERS.sub("", bare_name(name)) for name in found}
    twice = sorted(name for name, count in Counter(names.values()).items() if count > 1)
    refuse([f"{name} occurs twice, once behind a prefix" for name in twice], where)
    return {names[name]: value for name, value in found.items()}


def has_arguments(container: Container) -> bool:
    """Return whether a distributed checkpoint holds Megatron-LM's arguments."""
    return has_sizes(_common(container))


def has_sizes(common: Table) -> bool:
    """Return whether a checkpoint's common state has Megatron-LM's arguments with a model's sizes.

    Trainers that build the model from a config.json save none, or arguments of another kind.
    """
    return nested(common, _ARGUMENTS, "num_layers") is not None


def _common(container: Container, index: ShardedIndex | None = None) -> Table:
    """Return a checkpoint's common state: everything other than tensors.

    `index` saves reading the index again.

    Raises:
        CheckpointMismatchError: The state is missing, damaged or unsafe.
    """
    if COMMON_NAME in container.members:
        found = read_torch_file(container.members[COMMON_NAME])
    else:
        index = index or read_index(container)
        found = index.object(COMMON_KEY)
        found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if found is None and METADATA_NAME in container.members:
        container.needed(COMMON_NAME, "the description of what was saved")
    if index is not None and found is None:
        found = without_nulls({name: index.object(name) for name in _COMMON_OBJECTS})
    if not isinstance(found, Mapping):
        raise CheckpointMismatchError(f"{container}: {COMMON_NAME} does not hold a checkpoint")
    return found


def _check_backend(container: Container) -> None:
    """Check that megatron-core saved a distributed checkpoint in torch's format."""
    if METADATA_NAME not in container.members:
        return  # saved by torch, without megatron-core
    backend = json_file(container.members[METADATA_NAME]).get("sharded_backend")
    if backend == BACKEND:
        return
    advice = (
        "; megatron-core before 0.16 loads it, and Megatron-LM of that time saves it again with "
        "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
        if backend == "zarr"
        else ""
    )
    raise CheckpointMismatchError(
        f"{container.path}: {container.folder}{METADATA_NAME}: sharded_backend = {backend!r}; "
        f"expected {BACKEND}{advice}"
    )


def _layers(found: Mapping[str, ChunkedTensor], where: str) -> ChunkedTensors:
    """Return the tensors by logical name, with stacked layers and experts separated.

    Experts are named as on a single rank, `mlp.experts.local_experts.<number>`.
    """
    tensors: ChunkedTensors = {}
    twice = []
    for name, tensor in found.items():
        named = {
            _EXPERT.sub(r"\1.local_experts.", expert): values
            for layer, each in _unstacked(name, tensor, _STACKED, "")
            for expert, values in _unstacked(layer, each, _EXPERTS, "local_experts.")
        }
        twice += [f"{key} occurs twice, once in {name}" for key in named if key in tensors]
        tensors |= named
    refuse(twice, where)
    return tensors


def _unstacked(
    name: str, tensor: ChunkedTensor, stacked: re.Pattern[str], kind: str
) -> list[tuple[str, ChunkedTensor]]:
    """Return the entries of a stacked tensor by name, or a tensor that is not stacked."""
    match = stacked.match(name)
    if match is None or not tensor.shape or tensor.shape[0] > _MAX_LAYERS:
        return [(name, tensor)]
    return [(f"{match[1]}.{kind}{i}.{match[2]}", tensor.select(i)) for i in range(tensor.shape[0])]


def _with_joined_halves(tensors: Mapping[str, ChunkedTensor]) -> ChunkedTensors:
    """Return the tensors with the halves of gated projections joined, as in other formats."""
    joined = dict(tensors)
    for name, half in tensors.items():
        bare = name.removesuffix(_GATE)
        other = tensors.get(bare + _LINEAR) if name.endswith(_GATE) else None
        if other is not None and (other.dtype, other.shape) == (half.dtype, half.shape):
            joined[bare] = concatenated(joined.pop(name), joined.pop(bare + _LINEAR))
    return joined
