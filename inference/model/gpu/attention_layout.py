"""Layout of a step's attention: the tiles of new tokens that its programs take, as integers.

Import this module only where Triton is installed.
"""

# Shapes: N new tokens, B sequences, n tiles

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from inference.model.gpu import flash_attention
from inference.model.gpu.attention import LEAST_ROWS, PagedAttention, prompt_rows
from inference.model.gpu.attention_kernels import Tiles
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import AttentionRules, token_places

_ALIGNED = 4  # integers of 32 bits in 16 bytes


def paged_attention(
    segments: Array, cache: KVCache, *, rules: AttentionRules, flash: bool = True
) -> PagedAttention:
    """Return the attention of a step of any new tokens.

    Segments (B, 3 or 4) are integers: slot, place of the first new token, how many there are. The
    tokens of all segments follow each other in this order. With `flash` FlashAttention may serve
    the prompts.
    """
    longest = int(segments[:, 2].max())
    sizes = tile_sizes(rules, cache.shape.size_per_head, longest)
    cut = list(zip(cut_tiles(segments, sizes), sizes, strict=True))
    spans: tuple[Array, ...] = ()
    if flash and flash_attention.serves(rules, cache, longest=longest):
        spans, cut = flash_attention.spans(segments), cut[:1]
    cut = [(tiles, size) for tiles, size in cut if tiles.shape[1]]
    every = [*token_places(segments), *spans, *(row for tiles, _ in cut for row in tiles)]
    lengths = [len(each) for each in every]
    slots, places, *sent = split(on_device(pack(every, lengths), cache.device), lengths)
    prompts = flash_attention.Prompts(cache, longest, *sent[: len(spans)]) if spans else None
    tiles = tiles_of(sent[len(spans) :], [size for _, size in cut])
    return PagedAttention(slots, places, cache, tiles, rules, prompts=prompts)


def tiles_of(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[tuple[int, Tiles], ...]:
    """Return the tiles of each size, of which `parts` has slots, places, rows and counts."""
    return tuple((size, Tiles(*parts[4 * nth : 4 * nth + 4])) for nth, size in enumerate(sizes))


def split(buffer: Any, lengths: Sequence[int]) -> list[Any]:
    """Return the parts of a buffer that have these lengths, see `pack`."""
    starts = part_starts(lengths)
    return [buffer[start : start + n] for start, n in zip(starts, lengths, strict=False)]


def pack(arrays: Sequence[Array], lengths: Sequence[int]) -> Array:
    """Return arrays of integers in one buffer of int32, each in a part of its length.

    Each part begins at a multiple of 16 bytes. Triton compiles a kernel again for every set of
    pointers that do not, which would be in the middle of a client's request.
    """
    packed = np.zeros(part_starts(lengths)[-1], np.int32)
    for part, each in zip(split(packed, lengths), arrays, strict=True):
        part[: len(each)] = each
    return packed


def part_starts(lengths: Sequence[int]) -> list[int]:
    """Return where parts of a buffer begin, and where it ends."""
    return [0, *accumulate(-(-length // _ALIGNED) * _ALIGNED for length in lengths)]


def single_tokens(
    slots: torch.Tensor, places: torch.Tensor, cache: KVCache, *, rules: AttentionRules
) -> PagedAttention:
    """Return the attention of a graph's step of one new token for each sequence.

    The tokens' `slots` and `places` (B,) and the cache's tables must be written before the graph
    runs.
    """
    rows, ones = _rows_of_one(len(slots), slots.device)
    tiles = tile_sizes(rules, cache.shape.size_per_head)[0], Tiles(slots, places, rows, ones)
    return PagedAttention(slots, places, cache, (tiles,), rules, single=True)


@cache  # a graph should not make them again in every step
def _rows_of_one(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, device=device), torch.ones(count, dtype=torch.int64, device=device)


def tile_sizes(rules: AttentionRules, size_per_head: int, longest: int = 0) -> tuple[int, int]:
    """Return the tokens of a tile for single tokens and for prompts, a group's query heads each.

    Prompts have at most `longest` tokens, 0 for any. Those of batch-invariant steps are equal: a
    token's result depends on the tile's size.
    """
    if rules.batch_invariant:
        least = max(LEAST_ROWS // rules.group, 1)
        return least, least
    return 1, max(prompt_rows(size_per_head, longest) // rules.group, 1)


def cut_tiles(
    segments: Array, sizes: tuple[int, int], room: int | None = None
) -> tuple[Array, Array]:
    """Return the tiles of each of `tile_sizes`: slots, places, rows and counts, (4, n).

    A segment (B, 3 or 4) takes the least size that holds it, or the last. Where the large tiles
    would be more than `room`, the shortest segments take small ones.
    """
    rows = np.cumsum(segments[:, 2]) - segments[:, 2]
    kinds = np.minimum(np.searchsorted(sizes, segments[:, 2]), len(sizes) - 1)
    if room is not None:
        longest_first = np.argsort(-segments[:, 2], kind="stable")
        taken = np.cumsum(-(-segments[longest_first, 2] // sizes[1]) * kinds[longest_first])
        kinds[longest_first[taken > room]] = 0
    small, large = (_cut(segments[kinds == n], rows[kinds == n], sizes[n]) for n in range(2))
    return small, large


def _cut(segments: Array, rows: Array, size: int) -> Array:
    slots, places, counts = segments.T[:3]
    tiles = -(-counts // size)
    of = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * size
    left = np.minimum(counts[of] - first, size)
    cut = np.stack((slots[of], places[of] + first, rows[of] + first, left))
    # Those that read most begin first: none ends long after the others.
    longest_first: Array = cut[:, np.argsort(-cut[1], kind="stable")]
    return longest_first
