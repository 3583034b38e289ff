"""Attention within concatenated rows, by the prompt kernel; needs Triton.

One launch per layer serves rows of any lengths, without padding. The kernel sees the rows' keys and
values as a cache with blocks of one token, in the order of the tokens.
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

# Numbers per tile: the row's first token; the tile's first token, as an index in the row and among
# all tokens; the tile's number of tokens; the row's length.
TILE_NUMBERS = 5


def row_tiles(lengths: Sequence[int]) -> Array:
    """Return the tiles (TILE_NUMBERS, T) of rows of `lengths` tokens."""
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
    """Return each token's attention within its row, (N, H*D), for query, key, value (N, H, D).

    These three are parts of one tensor with contiguous heads. `tiles` (TILE_NUMBERS, T) int32 are
    from `row_tiles`; results of tokens in no tile are undefined. `bias` (H, 2 * reach + 1) is added
    to the scaled scores by the offset of key and query.
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
