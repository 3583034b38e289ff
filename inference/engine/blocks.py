"""Which slots and blocks of the cache are free, and which blocks a slot has.

A slot is a running sequence's place in steps. Its blocks hold its tokens; it takes them as it
grows, or all at once where it may not be asked to give way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from inference.model.kv_cache import TableEntry


class SlotPool:
    """Which slots are free. The lowest are given first, so that busy slots lie side by side."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """Number of slots nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return `count` slots in ascending order, or None if there are not so many."""
        if count > len(self._free):
            return None
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots that `take` returned."""
        for slot in slots:
            assert slot not in self._free, f"slot {slot} is free already"
            heapq.heappush(self._free, slot)


class BlockPool:
    """The blocks of a cache.

    Attributes:
        total: All of them; None where every slot has its own block, of which there is never a lack.
        reserved: Those of slots that took all they can ever need.
    """

    def __init__(self, *, blocks: int | None = None, block_tokens: int = 1) -> None:
        self.total = blocks
        self.reserved = 0
        self._size = block_tokens
        self._free = list(range(blocks or 0))[::-1]
        self._held: dict[int, list[int]] = {}
        self._reserved_slots: set[int] = set()
        self._entries: dict[tuple[int, int], int] = {}

    @property
    def free(self) -> int:
        """Number of blocks nobody holds."""
        return len(self._free)

    def count(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return 0 if self.total is None else -(-tokens // self._size)

    def lacking(self, slot: int, tokens: int) -> int:
        """Return how many blocks more a slot needs to hold so many tokens."""
        return max(self.count(tokens) - len(self._held.get(slot, ())), 0)

    def extend(self, slot: int, tokens: int) -> int:
        """Give a slot the blocks for its first `tokens` tokens, and return how many they hold.

        The blocks must be free.
        """
        held = self._held.setdefault(slot, [])
        for _ in range(self.lacking(slot, tokens)):
            block = self._free.pop()
            self._entries[slot, len(held)] = block
            held.append(block)
        return len(held) * self._size

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot all blocks that it can ever need."""
        self.extend(slot, tokens)
        self._reserved_slots.add(slot)
        self.reserved += len(self._held[slot])

    def release(self, slot: int) -> None:
        """Free what a slot holds."""
        held = self._held.pop(slot, [])
        if slot in self._reserved_slots:
            self._reserved_slots.remove(slot)
            self.reserved -= len(held)
        self._free += held
        self._entries = {cell: b for cell, b in self._entries.items() if cell[0] != slot}

    def take_entries(self) -> list[TableEntry]:
        """Return the blocks that slots got since the last call."""
        entries = [(slot, place, block) for (slot, place), block in self._entries.items()]
        self._entries.clear()
        return entries
