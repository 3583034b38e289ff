"""Settings of a rank: parallel sizes, types, device, cache and store.

It does not import torch, which takes seconds: the processes of ranks start before that.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from inference.parallel.layout import ParallelLayout

RANK_TIMEOUT_S = 7.0
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Parallel sizes, types and device of a model's ranks."""

    tp_size: int = 1
    pp_size: int = 1  # divides the layers
    data_type: str = "fp32"  # of computation: fp32, fp16 or bf16
    int8_mode: int = 0  # 1: matrices are quantised to 8 bits when they are loaded
    fp8: bool = False  # matrices and activations are rounded to FP8 (E4M3)
    kv_cache_dtype: str = "auto"  # fp8_e4m3: keys and values are rounded when they are stored
    batch_invariant: bool = False  # answers do not depend on concurrent requests, to the bit
    device: str = "auto"  # cpu, cuda, or auto: CUDA if a device is visible
    first_device: int = 0  # index of rank 0's GPU among the visible ones

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.pp_size


@dataclass(frozen=True, kw_only=True)
class RankSettings(Placement):
    """Everything a rank needs to load its part and to join the others."""

    ft_dir: str
    rank: int
    threads: int  # CPU threads of this rank
    slots: int = 1
    max_len: int = 1  # most tokens of a sequence
    block_tokens: int = 0  # of a cache block; 0: each slot has one block
    blocks: int = 0
    store: str = ""  # path of the store that ranks of one node share
    shared_memory: bool = True  # False: CPU ranks communicate over gloo even on one host
    rank_timeout_s: float = RANK_TIMEOUT_S
    encoder_only: bool = False  # serve only the encoder of an encoder-decoder
    device_index: int | None = None  # among the visible GPUs, if a launcher numbered the processes

    @property
    def layout(self) -> ParallelLayout:
        """This rank's place in the tensor x pipeline grid."""
        return ParallelLayout(self.rank, self.tp_size, self.pp_size)

    def to_json(self) -> str:
        """Return the settings as one line of text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankSettings:
        """Return the settings that `to_json` wrote."""
        return cls(**json.loads(text))
