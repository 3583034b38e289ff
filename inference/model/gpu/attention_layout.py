"""Layout of a step's attention: the tiles of new tokens that its programs take, as integers.

Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, n tiles

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from inference.model.gpu import flash_attention
from inference.model.gpu.attention import LEAST_ROWS, PagedAttention, Tiles
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import AttentionRules, token_places

_PROMPT_ROWS = 64  # query rows of a tile of prompts, (token, head of the group) each
_ALIGNED = 4  # integers of 32 bits in 16 bytes


@dataclass(frozen=True)
class AttentionArrays:
    """The integers of a step's attention, on the host."""

    slots: Array  # (N,)
    places: Array  # (N,)
    tiles: tuple[Array, Array]  # (4, n) of each size: slots, places, rows and counts

    @classmethod
    def of(
        cls, segments: Array, sizes: tuple[int, int], room: int | None = None
    ) -> AttentionArrays:
        """Return those of segments (B, 3), see `paged_attention` and `tile_sizes`.

        Where the large tiles would be more than `room`, the shortest segments take small ones.
        """
        small, large = _cut(segments, sizes, room)
        return cls(*token_places(segments), (small, large))


def paged_attention(
    segments: Array, cache: KVCache, *, rules: AttentionRules, group: int, flash: bool = True
) -> PagedAttention:
    """Return the attention of a step of any new tokens.

    Segments (B, 3) are integers: slot, place of the first new token, and how many there are. The
    tokens of all segments follow each other in this order. `group` are the query heads of a
    key/value head. With `flash` FlashAttention may serve the prompts.
    """
    sizes = tile_sizes(group, rules)
    arrays = AttentionArrays.of(segments, sizes)
    longest = int(segments[:, 2].max())
    cut = [(tiles, size) for tiles, size in zip(arrays.tiles, sizes, strict=True) if tiles.shape[1]]
    spans: tuple[Array, ...] = ()
    if flash and flash_attention.serves(rules, cache, longest=longest):
        spans = flash_attention.Prompts.arrays(segments)
        cut = [(arrays.tiles[0], sizes[0])] if arrays.tiles[0].shape[1] else []
    every = [arrays.slots, arrays.places, *spans, *(row for tiles, _ in cut for row in tiles)]
    slots, places, *sent = _sent_together(every, cache.device)
    prompts = None
    if spans:
        prompts = flash_attention.Prompts.of(sent[: len(spans)], cache, longest)
    tiles = tiles_of(sent[len(spans) :], [size for _, size in cut])
    return PagedAttention(slots, places, cache, tiles, rules, prompts=prompts)


def tiles_of(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[Tiles, ...]:
    """Return the tiles of each size, of which `parts` has slots, places, rows and counts."""
    found = []
    for nth, size in enumerate(sizes):
        slots, places, rows, counts = parts[4 * nth : 4 * nth + 4]
        found.append(Tiles(slots, places, rows, counts, size))
    return tuple(found)


def _sent_together(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of integers as int32 on a device, sent in one copy.

    Each begins at a multiple of 16 bytes. Triton compiles a kernel again for every set of pointers
    that do not, which would be in the middle of a client's request.
    """
    ends = np.cumsum([-(-len(each) // _ALIGNED) * _ALIGNED for each in arrays])
    packed = np.zeros(ends[-1], np.int32)
    starts = [0, *ends[:-1]]
    for start, each in zip(starts, arrays, strict=True):
        packed[start : start + len(each)] = each
    sent = on_device(packed, device)
    return [sent[start : start + len(each)] for start, each in zip(starts, arrays, strict=True)]


def single_tokens(
    slots: torch.Tensor, places: torch.Tensor, cache: KVCache, *, rules: AttentionRules, group: int
) -> PagedAttention:
    """Return the attention of a graph's step of one new token for each sequence.

    Slots, places and the cache's tables must be written before the graph runs.

    `slots` and `places` (B,) are those of the tokens; `group` as for `paged_attention`.
    """
    rows, ones = _rows_of_one(len(slots), slots.device)
    tiles = Tiles(slots, places, rows, ones, tile_sizes(group, rules)[0])
    return PagedAttention(slots, places, cache, (tiles,), rules, single=True)


@cache  # a graph should not make them again in every step
def _rows_of_one(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, device=device), torch.ones(count, dtype=torch.int64, device=device)


def tile_sizes(group: int, rules: AttentionRules) -> tuple[int, int]:
    """Return the tokens of a tile for single tokens and for prompts, `group` query heads each.

    Those of batch-invariant steps are equal: a token's result depends on the tile's size.
    """
    if rules.batch_invariant:
        least = max(LEAST_ROWS // group, 1)
        return least, least
    return 1, max(_PROMPT_ROWS // group, 1)


def _cut(segments: Array, sizes: tuple[int, int], room: int | None) -> Iterator[Array]:
    """Yield the tiles of each size: slots, places, rows and counts, (4, n).

    A segment takes the least size that holds it, or the last.
    """
    rows = np.cumsum(segments[:, 2]) - segments[:, 2]
    kinds = np.minimum(np.searchsorted(sizes, segments[:, 2]), len(sizes) - 1)
    if room is not None:
        longest_first = np.argsort(-segments[:, 2], kind="stable")
        taken = np.cumsum(-(-segments[longest_first, 2] // sizes[1]) * kinds[longest_first])
        kinds[longest_first[taken > room]] = 0
    for kind, size in enumerate(sizes):
        mine = kinds == kind
        slots, places, counts = segments[mine].T
        tiles = -(-counts // size)
        of = np.repeat(np.arange(len(tiles)), tiles)
        first = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size
        left = np.minimum(counts[of] - first, size)
        cut = np.stack((slots[of], places[of] + first, rows[mine][of] + first, left))
        # Those that read most begin first: none ends long after the others.
        yield cut[:, np.argsort(-cut[1], kind="stable")]
