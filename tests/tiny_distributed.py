"""Distributed checkpoints written in this process: torch_dist by torch itself, zarr by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import (
    CheckpointableShardedTensor,
    LocalShardsContainer,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

# A tensor's name -> on how many ranks which axis was cut.
Cuts = Mapping[str, tuple[int, int]]

_ZARR_TYPES = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "bfloat16"}


def write_distributed(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    common: Mapping[str, Any],
    cuts: Cuts | None = None,
    backend: str = "torch_dist",
) -> Path:
    """Write a checkpoint whose tensors lie in equal chunks along one axis; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write = {"torch_dist": _write_torch_dist, "zarr": _write_zarr}[backend]
    write(folder, tensors, cuts or {})
    torch.save(dict(common), folder / "common.pt")
    metadata = {"sharded_backend": backend, "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def _write_torch_dist(folder: Path, tensors: Mapping[str, torch.Tensor], cuts: Cuts) -> None:
    state = {
        name: sharded(name, _chunks(tensor, cuts.get(name))) for name, tensor in tensors.items()
    }
    write_state(folder, state)


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write tensors and objects by torch.distributed.checkpoint, without any process group."""
    writer = FileSystemWriter(folder, thread_count=2)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save(state, storage_writer=writer, planner=planner, no_dist=True)


def sharded(
    name: str, chunks: Sequence[tuple[torch.Tensor, tuple[int, ...]]]
) -> LocalShardsContainer:
    """Return a tensor of some chunks and where they begin, as megatron-core hands it to torch."""
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


def _write_zarr(folder: Path, tensors: Mapping[str, torch.Tensor], cuts: Cuts) -> None:
    """Write zarr's version 2 with the settings that megatron-core gives it."""
    for name, tensor in tensors.items():
        array = folder / name
        array.mkdir()
        axis, count = cuts.get(name, (0, 1))
        size = -(-tensor.shape[axis] // count)
        chunk = [size if i == axis else n for i, n in enumerate(tensor.shape)]
        header = {
            "chunks": chunk,
            "compressor": None,
            "dtype": _ZARR_TYPES[tensor.dtype],
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(tensor.shape),
            "zarr_format": 2,
        }
        (array / ".zarray").write_text(json.dumps(header))
        for i in range(count):
            full = torch.zeros(chunk, dtype=tensor.dtype)
            part = tensor.narrow(axis, i * size, min(size, tensor.shape[axis] - i * size))
            full.narrow(axis, 0, part.shape[axis]).copy_(part)
            place = ".".join(str(i if each == axis else 0) for each in range(tensor.ndim))
            (array / place).write_bytes(full.view(torch.uint8).numpy().tobytes())


def megatron_common(**args: Any) -> dict[str, Any]:
    """Return the contents of Megatron-LM's common.pt: everything but tensors."""
    return {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
