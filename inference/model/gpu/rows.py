"""Attention of whole rows laid end to end, by the kernel of prompts; needs Triton.

One launch for each layer serves rows of any lengths, without padding. To the kernel the rows' keys
and values are a cache of blocks of one token, which lie as the tokens do.
"""

# Shapes: N tokens of all rows, H heads, D head size, T tiles

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from inference.model.gpu.attention import constants, head_sizes, prompt_options
from inference.model.gpu.attention_kernels import (
    Cached,
    Inputs,
    Scores,
    Tiles,
    flash_attend_prompts,
)
from inference.model.kv_cache import Array
from inference.parallel.launch_cuda import launch_options

_QUERIES = 64  # of a tile

# The numbers of a tile: the first token of its row, the place of its own first token there, that
# token itself, how many it has, and the row's length.
TILE_NUMBERS = 5


def row_tiles(lengths: Sequence[int]) -> Array:
    """Return the tiles (TILE_NUMBERS, T) of rows of some tokens."""
    tiles = [
        (start, first - start, first, min(_QUERIES, stop - first), stop - start)
        for start, stop in pairwise([0, *accumulate(lengths)])
        for first in range(start, stop, _QUERIES)
    ]
    return np.ascontiguousarray(np.array(tiles, np.int32).T)


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tiles: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return each token's mix of the values of its own row, (N, H*D), for three (N, H, D).

    The three are parts of one tensor, heads side by side. `tiles` (TILE_NUMBERS, T) int32 are those
    of `row_tiles`; tokens that are in no tile get no result. `bias` (H, 2 * reach + 1) is added to
    the scores, which are scaled, by the offset of key and query.
    """
    count, H, D = query.shape
    assert query.stride() == key.stride() == value.stride()
    y = query.new_empty(count, H * D)
    heads = head_sizes(H, H, D, _QUERIES)
    token_stride = query.stride(0)
    flash_attend_prompts[(tiles.shape[1], H)](
        constants(Inputs(query, token_stride)),
        constants(
            Cached(
                keys_at=key,
                values_at=value,
                block_stride=token_stride,
                head_stride=D,
                tables_at=torch.arange(count, dtype=torch.int32, device=query.device),
                table_width=1,
                BLOCK=1,
            )
        ),
        None,
        Tiles(*tiles.unbind(0)),
        constants(
            Scores(
                scale=scale,
                bias_at=None if bias is None else bias.flip(1).contiguous(),  # by distance back
                TABLE=0 if bias is None else bias.shape[1],
                FIRST=0 if bias is None else -(bias.shape[1] // 2),
                CAUSAL=False,
            )
        ),
        *(y, H * D, constants(heads)),
        **prompt_options(query, heads),
        **launch_options(query),
    )
    return y
