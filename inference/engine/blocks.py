"""Free and occupied slots and blocks of the cache.

A slot is a running sequence's place in steps. Its blocks hold its tokens; it takes them as it
grows, or all at once if it may not be preempted.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from inference.model.kv_cache import TableEntry


class SlotPool:
    """The free slots. The lowest are taken first, which keeps busy slots side by side."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return `count` free slots in ascending order, or None if there are fewer."""
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

    Sequences share the blocks of equal prefixes: a full block may be registered under the digest of
    its sequence up to its end, and serves other slots until it is needed for other tokens.

    Attributes:
        total: Number of blocks; None where every slot has its own block.
        reserved: Blocks of slots that took all they can ever need.
    """

    def __init__(self, *, blocks: int | None = None, block_tokens: int = 1) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self.reserved = 0
        # Blocks without a user, in the order in which they are taken.
        self._free = OrderedDict.fromkeys(range(blocks or 0))
        self._users = [0] * (blocks or 0)
        self._held: dict[int, list[int]] = {}
        self._reserved_slots: set[int] = set()
        self._entries: dict[tuple[int, int], int] = {}
        self._remembered: dict[bytes, int] = {}
        self._beginnings: dict[int, bytes] = {}  # block -> its digest

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def count(self, tokens: int) -> int:
        """Return the number of blocks that hold a number of tokens."""
        return 0 if self.total is None else -(-tokens // self.block_tokens)

    def lacking(self, slot: int, tokens: int) -> int:
        """Return the number of further blocks that a slot needs for `tokens` tokens."""
        return max(self.count(tokens) - len(self._held.get(slot, ())), 0)

    def extend(self, slot: int, tokens: int) -> int:
        """Give a slot the blocks for its first `tokens` tokens; return the tokens they can hold.

        The blocks must be free.
        """
        held = self._held.setdefault(slot, [])
        for _ in range(self.lacking(slot, tokens)):
            block = next(iter(self._free))
            self._forget(block)
            self._give(slot, block)
        return len(held) * self.block_tokens

    def used(self, beginnings: Sequence[bytes]) -> int:
        """Return the number of a sequence's first blocks that other slots hold now."""
        used = (
            self._users[self._remembered[each]] if each in self._remembered else 0
            for each in beginnings
        )
        return sum(1 for _ in itertools.takewhile(bool, used))

    def own_from(self, slot: int) -> int:
        """Return the first token of a slot in a block that is not shared."""
        shared = (self._users[block] > 1 for block in self._held.get(slot, ()))
        return sum(1 for _ in itertools.takewhile(bool, shared)) * self.block_tokens

    def share(self, slot: int, beginnings: Sequence[bytes]) -> int:
        """Give a new slot the registered blocks of its prefix; return the tokens they hold.

        `beginnings` are the digests of the sequence up to the end of each of its first blocks.
        """
        held = self._held.setdefault(slot, [])
        assert not held, f"slot {slot} has blocks"
        for beginning in beginnings:
            block = self._remembered.get(beginning)
            if block is None:
                break
            self._give(slot, block)
        return len(held) * self.block_tokens

    def remember(self, slot: int, nth: int, beginning: bytes) -> None:
        """Register a slot's block for sharing; all of its tokens are being computed."""
        if beginning not in self._remembered:
            block = self._held[slot][nth]
            self._forget(block)
            self._remembered[beginning] = block
            self._beginnings[block] = beginning

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot all blocks that it can ever need."""
        self.extend(slot, tokens)
        self._reserved_slots.add(slot)
        self.reserved += len(self._held[slot])

    def release(self, slot: int, *, forget: bool = False) -> None:
        """Free the blocks of a slot; with `forget` they are no longer shared."""
        held = self._held.pop(slot, [])
        if slot in self._reserved_slots:
            self._reserved_slots.remove(slot)
            self.reserved -= len(held)
        for block in reversed(held):  # a prefix is more useful than the blocks after it
            if forget:
                self._forget(block)
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._beginnings)
        self._entries = {cell: b for cell, b in self._entries.items() if cell[0] != slot}

    def take_entries(self) -> list[TableEntry]:
        """Return the blocks that slots got since the last call."""
        entries = [(slot, place, block) for (slot, place), block in self._entries.items()]
        self._entries.clear()
        return entries

    def _give(self, slot: int, block: int) -> None:
        self._free.pop(block, None)
        self._users[block] += 1
        held = self._held[slot]
        self._entries[slot, len(held)] = block
        held.append(block)

    def _forget(self, block: int) -> None:
        beginning = self._beginnings.pop(block, None)
        if beginning is not None:
            del self._remembered[beginning]


def beginnings(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return a digest of a sequence up to the end of each of its full blocks.

    The digests are cryptographic: clients choose the tokens, and no two prefixes may collide.
    """
    names, digest = [], b""
    values = np.asarray(tokens, np.int64)
    for first in range(0, len(values) - block_tokens + 1, block_tokens):
        digest = hashlib.sha256(digest + values[first : first + block_tokens].tobytes()).digest()
        names.append(digest)
    return names
