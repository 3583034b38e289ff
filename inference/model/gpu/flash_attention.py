"""Attention of prompts by FlashAttention 3, where a Hopper GPU and its package are there.

The package is `flash-attn-3` of PyTorch's wheels; it reads keys and values where the cache has
them. Biases of scores and batch-invariant steps, which it does not know, stay with the kernels of
`attention_kernels`, as do steps that CUDA graphs serve and single tokens.
"""

# Shapes: N new tokens, B segments, H query heads, D head size

import importlib
import logging
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from inference.model.kv_cache import Array, KVCache
from inference.model.step import AttentionRules

logger = logging.getLogger(__name__)

_HOPPER = 9  # major compute capability
_MOST_SIZE = 256  # of a head; sizes are multiples of 8
# New tokens of the longest prompt from which on it is faster, for heads of up to 96 and larger
# ones; benchmarks.attention compares.
_LEAST_TOKENS = (1024, 256)


def spans(segments: Array) -> tuple[Array, ...]:
    """Return slots, starts, counts and lengths of segments (B, 3 or 4), as `Prompts` takes them."""
    slots, places, counts = segments.T[:3]
    return slots, np.cumsum([0, *counts]), np.where(counts > 1, counts, 0), places + counts


@dataclass(frozen=True)
class Prompts:
    """The segments of a step as FlashAttention takes them; int32 each."""

    cache: KVCache
    longest: int  # most of `counts`
    slots: torch.Tensor  # (B,)
    starts: torch.Tensor  # (B + 1,): first rows of the segments, and the end of the last
    counts: torch.Tensor  # (B,): new tokens of prompts, 0 for single tokens
    lengths: torch.Tensor  # (B,): cached tokens, with the new ones

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
        torch.ops.flash_attn_3.fwd(
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
            is_causal=True,
            window_size_left=-1 if window is None else window - 1,
            softcap=rules.softcap or 0.0,
            num_splits=1,
        )


def serves(rules: AttentionRules, cache: KVCache, *, longest: int) -> bool:
    """Whether FlashAttention 3 attends for prompts of at most `longest` new tokens."""
    size = cache.shape.size_per_head
    return (
        longest >= _LEAST_TOKENS[size > 96]
        and rules.causal
        and rules.alibi_slopes is None
        and rules.distance_bias is None
        and not rules.batch_invariant
        and cache.dtype in (torch.float16, torch.bfloat16)
        and size % 8 == 0
        and size <= _MOST_SIZE
        and _installed(cache.device)
    )


@cache
def _installed(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return False
    try:
        importlib.import_module("flash_attn_3._C")  # registers its operators with torch
    except ModuleNotFoundError:
        return False
    except (ImportError, OSError) as error:  # built for another torch or CUDA
        logger.warning("FlashAttention 3 is installed and cannot be loaded: %s", error)
        return False
    logger.info("FlashAttention 3 attends for long prompts")
    return True
