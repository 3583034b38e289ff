"""Concatenated rows of different lengths, and attention within each row.

Linears run over real tokens only, and on CPU adjacent rows of equal length share an attention call:
no result depends on padding.
"""

# Shapes: N tokens of all rows, H heads, D head size, S longest row

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inference.model.kv_cache import on_device
from inference.model.rotary import Angles
from inference.model.step import AttentionRules


@dataclass(frozen=True)
class RaggedRows:
    """Division of N tokens into rows of `lengths`; `tiles`, if any, are those of `gpu.rows`."""

    lengths: tuple[int, ...]
    positions: Tensor  # (N,) of each token within its row
    tiles: Tensor | None = None  # (TILE_NUMBERS, T) int32

    def per_token(self, values: Sequence[int]) -> Tensor:
        """Return each row's value, repeated for its tokens, (N,)."""
        return on_device(np.repeat(values, self.lengths), self.positions.device)


def ragged_rows(lengths: Sequence[int], device: torch.device, *, tiled: bool = False) -> RaggedRows:
    """Lay out rows of `lengths` tokens, each at least 1; padding is not computed.

    With `tiled`, attention uses the kernels of `gpu.rows`, which need 16-bit types.
    """
    assert lengths, "no rows"
    assert min(lengths) >= 1, "an empty row"
    positions = np.concatenate([np.arange(length) for length in lengths])
    tiles = None
    if tiled:
        from inference.model.gpu.rows import row_tiles

        tiles = on_device(row_tiles(lengths), device)
    return RaggedRows(tuple(lengths), on_device(positions, device), tiles)


@dataclass(frozen=True)
class EncoderStep:
    """Inputs that an encoder's layers share.

    The `distance_bias` of its `rules`, (H, 2 * reach + 1), is indexed by the offset of key and
    query; offsets beyond the reach take the outermost entry.
    """

    selected: ClassVar[None] = None  # the outputs of all tokens are computed

    rows: RaggedRows
    rules: AttentionRules
    tasks: Tensor | None = None  # IA3 task of each token (N,), None without IA3
    # Receives the weights, (rows, stage's layers, H, S, S), except beyond a row's length.
    attentions: Tensor | None = None

    @cached_property
    def _bias(self) -> Tensor | None:
        """The bias on the scores of the longest row, (H, S, S)."""
        table = self.rules.distance_bias
        if table is None:
            return None
        reach = table.shape[1] // 2
        places = torch.arange(max(self.rows.lengths), device=table.device)
        return table[:, (places - places.unsqueeze(1)).clamp(-reach, reach) + reach]

    def attention(
        self,
        query: Tensor,
        *,
        layer: int,
        new: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """Return each token's attention within its row, with the signature of `CachedAttention`.

        `layer` is the index into `attentions`.
        """
        assert new is not None
        assert angles is None
        key, value = new.chunk(2, dim=1)
        scale, tiles = self.rules.scale, self.rows.tiles
        assert scale is not None
        if tiles is not None and self.attentions is None:
            from inference.model.gpu.rows import attend_rows

            bias = self.rules.distance_bias
            return attend_rows(query, key, value, tiles=tiles, bias=bias, scale=scale)
        mixed, first, row = query.new_empty(query.shape), 0, 0
        for length, run in groupby(self.rows.lengths):
            count = sum(1 for _ in run)
            stop = first + count * length
            queries, keys, values, target = (
                each[first:stop].view(count, length, *each.shape[1:]).transpose(1, 2)
                for each in (query, key, value, mixed)
            )  # (B, H, S, D)
            bias = None if self._bias is None else self._bias[:, :length, :length]
            if self.attentions is None:
                part = functional.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=bias, scale=scale
                )
            else:
                scores = queries @ keys.transpose(2, 3) * scale  # (B, H, S, S)
                scores = scores if bias is None else scores + bias
                weights = scores.float().softmax(-1).to(query.dtype)
                self.attentions[row : row + count, layer, :, :length, :length] = weights
                part = weights @ values
            target.copy_(part)
            first, row = stop, row + count
        return mixed.flatten(1)
