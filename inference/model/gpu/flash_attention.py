"""Attention of prompts by FlashAttention 4, on a Hopper GPU with its package installed.

The kernels of the package `flash-attn-4` read keys and values from the cache, and are compiled at
their first call, once for each kind of attention. The engine's own kernels (`attention_kernels`)
serve score biases and batch-invariant steps, which the package lacks, soft caps, with which it is
slower, single tokens, and steps in CUDA graphs.
"""

# Shapes: N new tokens, B segments, H query heads, D head size

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from typing import Any

import numpy as np
import torch

from inference.model.kv_cache import Array, KVCache
from inference.model.step import AttentionRules

logger = logging.getLogger(__name__)

RELEASE = "4.0.0b36"  # the signature of its private function may change in any other
_HOPPER = 9  # major compute capability
_MAX_SIZE = 256  # of a head; sizes are multiples of 8


def spans(segments: Array) -> tuple[Array, ...]:
    """Return slots, starts, counts and lengths of segments (B, 3 or 4), as `Prompts` takes them."""
    slots, places, counts = segments.T[:3]
    return slots, np.cumsum([0, *counts]), np.where(counts > 1, counts, 0), places + counts


@dataclass(frozen=True)
class Prompts:
    """The segments of a step in the form that FlashAttention takes; tensors are int32."""

    cache: KVCache
    longest: int  # largest of `counts`
    slots: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B + 1,): first row of each segment, then the end of the last
    counts: torch.Tensor  # (B,): new tokens of prompts, 0 for single tokens
    lengths: torch.Tensor  # (B,): cached tokens, including the new ones

    @cached_property
    def _tables(self) -> torch.Tensor:
        return self.cache.tables.index_select(0, self.slots)  # (B, blocks of a slot)

    def attend(
        self, query: torch.Tensor, layer: int, rules: AttentionRules, *, out: torch.Tensor
    ) -> None:
        """Write the results of prompts' tokens into `out` (N, H*D); rows of single tokens stay.

        `query` (N, H, D) is rotated, and the cache has the new keys and values.
        """
        keys, values = (part.transpose(1, 2) for part in self.cache.blocks(layer))
        window = rules.window(layer)
        attend = _forward_pass(self.cache.device)
        assert attend is not None
        attend(
            query,
            keys,
            values,
            out=out.view(query.shape),
            cu_seqlens_q=self.starts,
            seqused_q=self.counts,
            seqused_k=self.lengths,
            max_seqlen_q=self.longest,
            page_table=self._tables,
            softmax_scale=rules.scale,
            causal=True,
            window_size_left=None if window is None else window - 1,
        )


def serves(rules: AttentionRules, cache: KVCache, *, longest: int) -> bool:
    """Whether FlashAttention 4 attends for prompts of at most `longest` new tokens."""
    size = cache.shape.size_per_head
    return (
        longest >= _min_tokens(size)
        and rules.causal
        and rules.alibi_slopes is None
        and rules.distance_bias is None
        and rules.softcap is None
        and not rules.batch_invariant
        and cache.dtype in (torch.float16, torch.bfloat16)
        and size % 8 == 0
        and size <= _MAX_SIZE
        and _forward_pass(cache.device) is not None
    )


def _min_tokens(size: int) -> int:
    """Return the longest prompt's tokens from which it is faster (benchmarks.attention)."""
    if size > 96:
        return 256
    return 512 if size > 64 else 1536


@cache
def _forward_pass(device: torch.device) -> Callable[..., Any] | None:
    """Return the library's forward pass, or None if it is absent, unusable or not for this GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return None
    try:
        # FlashAttention 2 has a module of this name, too.
        release = metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return None
    if release != RELEASE:
        logger.warning("FlashAttention 4 is not used: it is %s, and %s is needed", release, RELEASE)
        return None
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    except (ImportError, OSError) as error:  # built for another torch or CUDA
        logger.warning("FlashAttention 4 is installed and cannot be loaded: %s", error)
        return None
    logger.info("FlashAttention 4 attends for long prompts")
    attend: Callable[..., Any] = interface._flash_attn_fwd
    return attend
