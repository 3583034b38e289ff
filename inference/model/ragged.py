"""Rows of different lengths laid end to end, and attention within each of them.

Linears run over the true tokens only; attention takes neighbouring rows together while that wastes
little, so that no result depends on padding.
"""

# Shapes: N tokens of all rows, B rows of a group, S longest row of a group, H heads, D head size

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from inference.model.kv_cache import on_device
from inference.model.step import may_share_call, runs


@dataclass(frozen=True)
class RowGroup:
    """Neighbouring rows that share one attention call.

    `gather` (B*S,) and `scatter` (tokens,) translate between the tokens that are computed and
    padded ones, None where these are the same; `hidden` (B, 1, 1, S) marks padding, None if none.
    `width` is S.
    """

    tokens: slice
    lengths: tuple[int, ...]
    gather: torch.Tensor | None
    scatter: torch.Tensor | None
    hidden: torch.Tensor | None
    width: int

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, H, S, D) for the group's part of x (N, H, D)."""
        part = x[self.tokens]
        if self.gather is not None:
            part = part.index_select(0, self.gather)  # (B*S, H, D)
        return part.view(len(self.lengths), self.width, *part.shape[1:]).transpose(1, 2)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, H*D) for x (B, H, S, D)."""
        flat = x.transpose(1, 2).flatten(0, 1).flatten(1)  # (B*S, H*D)
        return flat if self.scatter is None else flat.index_select(0, self.scatter)

    def mask(self, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the addition to the scores, for a position bias (1, H, S or more, ...) or none."""
        bias = None if bias is None else bias[:, :, : self.width, : self.width]
        if self.hidden is None:
            return None if bias is None else bias.to(dtype)
        padding = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        padding = padding.masked_fill_(self.hidden, float("-inf"))
        return padding if bias is None else padding + bias.to(dtype)  # (B, H or 1, S or 1, S)


@dataclass(frozen=True)
class RaggedRows:
    """Division of N tokens into rows of `lengths`; `tiles`, if given, are those of `gpu.rows`."""

    lengths: tuple[int, ...]
    positions: torch.Tensor  # (N,) of each token within its row
    tiles: torch.Tensor | None = None  # (TILE_NUMBERS, T) int32

    @cached_property
    def groups(self) -> tuple[RowGroup, ...]:
        """The rows that share an attention call, where `tiles` does not serve all."""
        groups, start = [], 0
        for run in runs(self.lengths, lambda run, length: may_share_call([*run, length])):
            groups.append(_group(start, run, self.positions.device))
            start += sum(run)
        return tuple(groups)

    def per_token(self, values: Sequence[int]) -> torch.Tensor:
        """Return (N,): each row's value, repeated for its tokens."""
        return on_device(np.repeat(values, self.lengths), self.positions.device)


@dataclass(frozen=True)
class RowMasks:
    """Inputs that an encoder's layers share: masks and bias of the scores, and IA3 tasks."""

    rows: RaggedRows
    # By offset of key and query, (H, 2 * reach + 1), farther ones as the outermost; None for none.
    bias: torch.Tensor | None
    dtype: torch.dtype
    tasks: torch.Tensor | None = None  # IA3 task of each token (N,), None without IA3
    # Receives the weights: (rows, stage's layers, H, S, S). Entries beyond a row's length are left.
    attentions: torch.Tensor | None = None

    @cached_property
    def groups(self) -> list[torch.Tensor | None]:
        """One for each group of rows, see `RowGroup.mask`."""
        bias = None
        if self.bias is not None:
            reach, width = self.bias.shape[1] // 2, max(group.width for group in self.rows.groups)
            places = torch.arange(width, device=self.bias.device)
            offset = (places - places.unsqueeze(1)).clamp(-reach, reach)  # (S, S)
            bias = self.bias[:, offset + reach].unsqueeze(0)  # (1, H, S, S)
        return [group.mask(bias, self.dtype) for group in self.rows.groups]


def ragged_rows(lengths: Sequence[int], device: torch.device, *, tiled: bool = False) -> RaggedRows:
    """Lay out rows of `lengths` tokens, each at least 1; padding is not computed.

    With `tiled` attention takes the kernels of `gpu.rows`, which are made for 16 bits.
    """
    assert lengths, "no rows"
    assert min(lengths) >= 1, "an empty row"
    positions = np.concatenate([np.arange(length) for length in lengths])
    tiles = None
    if tiled:
        from inference.model.gpu.rows import row_tiles

        tiles = on_device(row_tiles(lengths), device)
    return RaggedRows(tuple(lengths), on_device(positions, device), tiles)


def _group(start: int, lengths: list[int], device: torch.device) -> RowGroup:
    tokens = slice(start, start + sum(lengths))
    width = max(lengths)
    if min(lengths) == width:
        return RowGroup(tokens, tuple(lengths), None, None, None, width)
    counts = torch.tensor(lengths, device=device).unsqueeze(1)
    hidden = torch.arange(width, device=device) >= counts  # (B, S): beyond the row's length
    scatter = (~hidden).flatten().nonzero().squeeze(1)  # (tokens,)
    # Padding repeats its own row's first token: a NaN of another row would spoil it, masked or not.
    starts = [0, *itertools.accumulate(lengths)][:-1]
    gather = torch.tensor(starts, device=device).repeat_interleave(width)
    gather[scatter] = torch.arange(len(scatter), device=device)
    return RowGroup(tokens, tuple(lengths), gather, scatter, hidden[:, None, None, :], width)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    masks: RowMasks,
    scale: float,
    layer: int = 0,
) -> torch.Tensor:
    """Return each token's mix of the values of its own row, (N, H*D) for three (N, H, D).

    `layer` is its place in `masks.attentions`.
    """
    weights_out = None if masks.attentions is None else masks.attentions[:, layer]
    if masks.rows.tiles is not None and weights_out is None:
        from inference.model.gpu.rows import attend_rows

        return attend_rows(query, key, value, tiles=masks.rows.tiles, bias=masks.bias, scale=scale)
    parts = []
    row = 0
    for group, mask in zip(masks.rows.groups, masks.groups, strict=True):
        queries, keys, values = (group.pad(each) for each in (query, key, value))
        if weights_out is None:
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=scale
            )
        else:
            scores = queries @ keys.transpose(2, 3) * scale  # (B, H, S, S)
            scores = scores if mask is None else scores + mask
            weights = scores.float().softmax(-1).to(query.dtype)
            for index, length in enumerate(group.lengths):
                weights_out[row + index, :, :length, :length] = weights[index, :, :length, :length]
            mixed = weights @ values
        row += len(group.lengths)
        parts.append(group.pack(mixed))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
