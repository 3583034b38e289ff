"""The limit of decoding speed: the bytes that a step reads over the memory's bandwidth."""

from __future__ import annotations

import time
from math import prod
from pathlib import Path

import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.ft.config_ini import read_config
from inference.ranks.device import compute_dtype, matrix_dtype

_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}
_ROUNDS = 7


def measured_bandwidth(device: str) -> float:
    """Return bytes/s of the best of some readings of memory, by as many threads as torch uses."""
    values = torch.ones(_BYTES[device] // 4, device=device)

    def read() -> None:
        # The fastest of torch's reductions.
        if device == "cpu":
            torch.dot(values, values)
        else:
            values.sum()
            torch.cuda.synchronize()

    read()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - start)
    return values.nbytes / min(seconds)


def step_bytes(
    ft_dir: Path, data_type: str, device: str, int8: bool, batch: int, length: int
) -> int:
    """Return the bytes of weights, keys and values that one decoding step reads.

    Args:
        ft_dir: A decoder-only model.
        data_type: Type of computation.
        device: cpu or cuda.
        int8: Whether matrices are kept in 8 bits.
        batch: Sequences.
        length: Cached tokens of each.
    """
    family, config = read_config(ft_dir)
    architecture = family.architecture(config)
    assert isinstance(architecture, DecoderArchitecture)
    computed = compute_dtype(data_type, torch.device(device))
    kept = matrix_dtype(data_type, config.weight_data_type, torch.device(device)) or computed
    matrix_bytes = 1 if int8 else kept.itemsize
    # Of the embedding one row is read per token, unless it is the head as well.
    unread = {"model.wpe", "model.wte" if architecture.untied_head else ""}
    weights = 0
    for tensor in family.tensors(config):
        if tensor.name in unread:
            continue
        is_matrix = len(tensor.shape) > 1
        weights += prod(tensor.shape) * (matrix_bytes if is_matrix else computed.itemsize)
    head_bytes = architecture.kv_head_num * architecture.size_per_head * computed.itemsize
    return weights + batch * length * 2 * architecture.num_layer * head_bytes
