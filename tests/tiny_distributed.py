"""Distributed checkpoints written in this process by torch itself."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests.json_files import write_json

# A tensor's name -> on how many ranks which axis was cut.
Cuts = Mapping[str, tuple[int, int]]


def write_distributed(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    common: Mapping[str, Any],
    cuts: Cuts | None = None,
    threads: int = 2,
) -> Path:
    """Write a checkpoint whose tensors lie in equal chunks along one axis; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    cuts = cuts or {}
    state = {
        name: sharded(name, _chunks(tensor, cuts.get(name))) for name, tensor in tensors.items()
    }
    write_state(folder, state, threads)
    torch.save(dict(common), folder / "common.pt")
    metadata = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_json(folder / "metadata.json", metadata)
    return folder


def write_state(folder: Path, state: dict[str, Any], threads: int = 2) -> None:
    """Write tensors and objects by torch.distributed.checkpoint, without any process group."""
    writer = FileSystemWriter(folder, thread_count=threads)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=writer, planner=planner, no_dist=True)


def sharded(name: str, chunks: Sequence[tuple[torch.Tensor, tuple[int, ...]]]) -> Any:
    """Return a tensor of some chunks and where they begin, as megatron-core hands it to torch."""
    # Four seconds, which no other test should take when it is collected.
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.checkpointable import (
        CheckpointableShardedTensor,
        LocalShardsContainer,
    )

    ends = [
        [begin + size for begin, size in zip(offset, chunk.shape, strict=True)]
        for chunk, offset in chunks
    ]
    whole = tuple(max(each) for each in zip(*ends, strict=True))
    return LocalShardsContainer(
        [
            CheckpointableShardedTensor.from_sh_ten(
                ShardedTensor(
                    key=name,
                    data=chunk.contiguous(),
                    dtype=chunk.dtype,
                    local_shape=tuple(chunk.shape),
                    global_shape=whole,
                    global_offset=tuple(offset),
                    axis_fragmentations=None,
                )
            )
            for chunk, offset in chunks
        ]
    )


def _chunks(
    tensor: torch.Tensor, cut: tuple[int, int] | None
) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    axis, count = cut or (0, 1)
    chunks = []
    begin = 0
    for part in tensor.chunk(count, axis):
        offset = [0] * tensor.ndim
        offset[axis] = begin
        begin += part.shape[axis]
        chunks.append((part, tuple(offset)))
    return chunks


def megatron_common(**args: Any) -> dict[str, Any]:
    """Return the contents of Megatron-LM's common.pt: everything but tensors."""
    return {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
