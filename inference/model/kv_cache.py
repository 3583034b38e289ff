"""Keys and values of the running sequences, in lanes of one fixed length each.

All memory is taken once: lanes x tokens is the budget, and a lane is one running sequence (a beam
search holds one per beam). On CPU the system backs a page only when a token is first written there.
"""

# Shapes: L local layers, B lanes, H local key/value heads, S tokens a lane can hold, D head size,
#         N tokens of a step

from __future__ import annotations

import heapq
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# In place of a source lane: nothing, to remove values that are not finite.
WIPE = -1


def prefix_source(task_id: int) -> int:
    """Return what stands in place of a source lane for the loaded prefix of a prompt task."""
    return WIPE - 1 - task_id


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one rank's cache."""

    num_layer: int
    lanes: int
    kv_head_num: int
    max_len: int
    size_per_head: int

    def size_bytes(self, item_size: int) -> int:
        """Return the memory of keys and values together."""
        return (self.lanes + 1) * self.max_len * self.token_bytes(item_size)

    def token_bytes(self, item_size: int) -> int:
        """Return the memory of one token's keys and values."""
        return 2 * self.num_layer * self.kv_head_num * self.size_per_head * item_size


class KVCache:
    """One rank's keys and values."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Take the memory.

        Args:
            shape: Sizes.
            dtype: Of keys and values.
            device: Where they lie.
            prefixes: Of each prompt task, what `copy` may start a lane with: (L, 2, H, tokens, D).
        """
        self.shape = shape
        self._prefixes = prefixes
        # One lane more, for tokens that only fill a step of fixed size.
        sizes = (shape.num_layer, shape.lanes + 1, 2, shape.kv_head_num, shape.max_len)
        self._data = _zeros((*sizes, shape.size_per_head), dtype, device)
        self._layers = list(self._data.unbind(0))  # each (B, 2, H, S, D)
        self._rows = [layer.view(-1, shape.size_per_head) for layer in self._layers]

    @property
    def scratch_lane(self) -> int:
        """A lane for tokens that nobody reads."""
        return self.shape.lanes

    def token_rows(self, lanes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where the keys and values of tokens lie, for `write`: (N * 2 * H,)."""
        heads = self.shape.kv_head_num
        parts = torch.arange(2 * heads, device=lanes.device)  # key heads, then value heads
        rows = (lanes * (2 * heads)).unsqueeze(1) + parts  # (N, 2H)
        return (rows * self.shape.max_len + positions.unsqueeze(1)).flatten()

    def write(self, layer: int, rows: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store the (N, 2, H, D) keys and values of a local layer at `rows` of `token_rows`."""
        flat = keys_values.reshape(-1, self.shape.size_per_head)
        self._rows[layer].index_copy_(0, rows, flat)

    def read(
        self, layer: int, lane: int, lane_count: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the first `length` keys and values of lanes in a row.

        Each is (lane_count, H, length, D).
        """
        lanes = self._layers[layer][lane : lane + lane_count, :, :, :length]
        return lanes[:, 0], lanes[:, 1]

    def copy(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy tokens among lanes: (source, target, first token, end) each.

        Sources are read before any target is written, so lanes may swap. The source WIPE stands
        for zeros, those of `prefix_source` for a loaded prefix. A lane that is its own source
        forgets, after all that, what comes before these tokens: they move to its beginning.
        """
        self._copy([move for move in moves if move[0] != move[1]])
        self._copy([move for move in moves if move[0] == move[1]])

    def _copy(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        saved = [self._values(source, start, stop) for source, _, start, stop in moves]
        for (source, target, start, stop), values in zip(moves, saved, strict=True):
            first = 0 if source == target else start
            room = self._data[:, target, :, :, first : first + stop - start]
            if values is None:
                room.zero_()
            else:
                room.copy_(values)

    def _values(self, source: int, start: int, stop: int) -> torch.Tensor | None:
        if source == WIPE:
            return None
        if source < WIPE:
            return self._prefixes[WIPE - 1 - source][:, :, :, start:stop]
        return self._data[:, source, :, :, start:stop].clone()


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, not whatever memory holds: a masked NaN would still spoil its row.

    On CPU the pages are the system's own zeros, taken when first written.
    """
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    count = math.prod(sizes)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)


class LanePool:
    """Which lanes are free. The lowest are given first, so that busy lanes lie side by side."""

    def __init__(self, lanes: int) -> None:
        self.total = lanes
        self._free = list(range(lanes))

    @property
    def free(self) -> int:
        """Number of lanes nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return `count` lanes in ascending order, or None if there are not so many."""
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, lanes: Sequence[int]) -> None:
        """Free lanes that `take` returned."""
        for lane in lanes:
            assert lane not in self._free, f"lane {lane} is free already"
            heapq.heappush(self._free, lane)
