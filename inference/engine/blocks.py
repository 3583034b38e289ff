"""Which lanes and blocks of the cache are free, and which blocks a lane has.

A lane is a running sequence's place in steps. Its blocks hold its tokens; it takes them as it
grows, or all at once where it may not be asked to give way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from inference.model.kv_cache import TableEntry


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


class BlockPool:
    """The blocks of a cache.

    Attributes:
        total: All of them; None where every lane has its own block, of which there is never a lack.
        reserved: Those of lanes that took all they can ever need.
    """

    def __init__(self, *, blocks: int | None = None, block_tokens: int = 1) -> None:
        self.total = blocks
        self.reserved = 0
        self._size = block_tokens
        self._free = list(range(blocks or 0))[::-1]
        self._held: dict[int, list[int]] = {}
        self._reserved_lanes: set[int] = set()
        self._entries: dict[tuple[int, int], int] = {}

    @property
    def free(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._free)

    def count(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return 0 if self.total is None else -(-tokens // self._size)

    def lacking(self, lane: int, tokens: int) -> int:
        """Return how many blocks more a lane needs to hold so many tokens."""
        return max(self.count(tokens) - len(self._held.get(lane, ())), 0)

    def extend(self, lane: int, tokens: int) -> int:
        """Give a lane the blocks for its first `tokens` tokens, and return how many they hold.

        The blocks must be free.
        """
        held = self._held.setdefault(lane, [])
        for _ in range(self.lacking(lane, tokens)):
            block = self._free.pop()
            self._entries[lane, len(held)] = block
            held.append(block)
        return len(held) * self._size

    def reserve(self, lane: int, tokens: int) -> None:
        """Give a lane all blocks that it can ever need."""
        self.extend(lane, tokens)
        self._reserved_lanes.add(lane)
        self.reserved += len(self._held[lane])

    def release(self, lane: int) -> None:
        """Free what a lane holds."""
        held = self._held.pop(lane, [])
        if lane in self._reserved_lanes:
            self._reserved_lanes.remove(lane)
            self.reserved -= len(held)
        self._free += held
        self._entries = {cell: b for cell, b in self._entries.items() if cell[0] != lane}

    def take_entries(self) -> list[TableEntry]:
        """Return the blocks that lanes got since the last call."""
        entries = [(lane, place, block) for (lane, place), block in self._entries.items()]
        self._entries.clear()
        return entries
