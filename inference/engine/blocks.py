"""Free and occupied blocks of the cache.

A slot is a running sequence's place in steps, and its blocks hold its tokens. It takes blocks as it
grows; those of a sequence that cannot be preempted are reserved in advance.
"""

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.model.kv_cache import Move, Span, TableEntry


class BlockPool:
    """The blocks of a cache.

    Sequences share the blocks of equal prefixes: a full block can be registered under the hash of
    all tokens up to its end, and serves other slots until it is reused for other tokens. Slots that
    `fork` share their full blocks, too.

    Attributes:
        total: Number of blocks; None where every slot has one fixed block of `block_tokens`.
    """

    def __init__(self, *, blocks: int | None, block_tokens: int) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        # Free blocks; the first is taken next.
        self._free = OrderedDict.fromkeys(range(blocks or 0))
        self._users = [0] * (blocks or 0)
        self._held: dict[int, list[int]] = {}
        # Slots that fork from each other -> the most blocks that they need together.
        self._reservations: dict[tuple[int, ...], int] = {}
        self._entries: dict[tuple[int, int], int] = {}
        self._registered: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}  # block -> hash of its prefix

    @property
    def reserved(self) -> int:
        """Number of reserved blocks, whether slots hold them already or not."""
        return sum([*self._reservations.values()])

    @property
    def free(self) -> int:
        """Number of blocks that are neither held nor reserved; may be read by any thread."""
        outstanding = 0
        for slots, most in [*self._reservations.items()]:
            blocks = [self._held.get(slot, ()) for slot in slots]
            outstanding += most - (len(blocks[0]) if len(blocks) == 1 else len({*chain(*blocks)}))
        return len(self._free) - outstanding

    def count(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens take."""
        return 0 if self.total is None else -(-tokens // self.block_tokens)

    def extend(self, slot: int, tokens: int) -> int:
        """Give a slot blocks for its first `tokens` tokens; return the tokens that fit into them.

        The blocks must be free, or reserved for the slot.
        """
        for nth in range(len(self._held.get(slot, ())), self.count(tokens)):
            block = next(iter(self._free))
            self._forget(block)
            self._put(slot, nth, block)
        return len(self._held.get(slot, ())) * self.block_tokens

    def used(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a sequence's first blocks other slots hold now."""
        used = (
            self._users[self._registered[each]] if each in self._registered else 0
            for each in hashes
        )
        return sum(1 for _ in itertools.takewhile(bool, used))

    def share(self, slot: int, first: int, hashes: Sequence[bytes]) -> int:
        """Give a slot the registered blocks of its prefix from index `first`; return their number.

        They replace blocks of the slot that hold nothing yet, which become free. `hashes` are those
        of the sequence up to the end of each of its first blocks.
        """
        held, shared = self._held.setdefault(slot, []), 0
        for nth, prefix in enumerate(hashes[first:], first):
            block = self._registered.get(prefix)
            if block is None:
                break
            self._put(slot, nth, block)
            shared += 1
        if shared:  # ranks drop the table entries beyond a slot's newest one
            self._entries[slot, len(held) - 1] = held[-1]
        return shared

    def register(self, slot: int, nth: int, prefix: bytes) -> None:
        """Register a slot's block for sharing; all its tokens are computed or being computed."""
        if prefix not in self._registered:
            block = self._held[slot][nth]
            self._forget(block)
            self._registered[prefix] = block
            self._hashes[block] = prefix

    def reserve(self, slots: Sequence[int], most: int) -> None:
        """Reserve the most blocks that slots will need together, including those they hold."""
        self._reservations[tuple(slots)] = most
        assert self.free >= 0, "more blocks are reserved than are free"

    def fork(self, sources: dict[int, int], tokens: int) -> list[Move]:
        """Let slots continue from other slots of their reservation; return the necessary copies.

        A slot shares the full blocks of its source, and gets space for one more token. One of the
        slots with the same source takes over its partly filled block, the others copy it. Slots of
        the reservation without a source lose their blocks. `sources` maps a slot to its source;
        every source holds `tokens` tokens.
        """
        start = tokens - tokens % self.block_tokens
        copies = _copies(sources) if start < tokens else {}
        any_slot = next(iter(sources))
        slots = next(slots for slots in self._reservations if any_slot in slots)
        before = {slot: [*self._held.setdefault(slot, [])] for slot in slots}
        for slot, held in before.items():
            blocks = before[sources[slot]] if slot in sources else []
            blocks = blocks[: self.count(start if slot in copies else tokens)]
            for nth, block in enumerate(blocks):
                if held[nth : nth + 1] != [block]:
                    self._put(slot, nth, block)
            self._drop(held[len(blocks) :])
            del self._held[slot][len(blocks) :]
        for slot in sources:
            self.extend(slot, tokens + 1)
        return [(source, slot, start, tokens) for slot, source in copies.items()]

    def release(self, slots: Sequence[int], *, forget: bool = False) -> list[Span]:
        """Free the blocks of slots; with `forget` they are no longer shared.

        Slots of one reservation must be released together. Returns the tokens that no other slot
        holds, block by block.
        """
        for reserved in [each for each in self._reservations if each[0] in slots]:
            del self._reservations[reserved]
        own: list[Span] = []
        for slot in slots:
            held = self._held.pop(slot, [])
            if self.total is None:
                own.append((slot, 0, self.block_tokens))
            for nth, block in enumerate(held):
                first = nth * self.block_tokens
                if self._users[block] == 1:
                    own.append((slot, first, first + self.block_tokens))
                if forget:
                    self._forget(block)
            self._drop(held)
        self._entries = {cell: b for cell, b in self._entries.items() if cell[0] not in slots}
        return own

    def take_entries(self) -> list[TableEntry]:
        """Return the table entries added since the last call."""
        entries = [(slot, place, block) for (slot, place), block in self._entries.items()]
        self._entries.clear()
        return entries

    def _put(self, slot: int, nth: int, block: int) -> None:
        """Make a block the `nth` of a slot, in place of the one that was there."""
        held = self._held.setdefault(slot, [])
        self._free.pop(block, None)
        self._users[block] += 1
        self._drop(held[nth : nth + 1])
        held[nth : nth + 1] = [block]
        self._entries[slot, nth] = block

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # so that earlier blocks, the more useful ones, stay longer
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hashes)

    def _forget(self, block: int) -> None:
        prefix = self._hashes.pop(block, None)
        if prefix is not None:
            del self._registered[prefix]


def prefix_hashes(tokens: Sequence[int], block_tokens: int, shift: int = 0) -> list[bytes]:
    """Return the hash of a sequence up to the end of each of its full blocks.

    `shift` is the shift of the sequence's positions, on which its keys depend. The hash is
    cryptographic, because clients choose the tokens and must not be able to cause collisions.
    """
    hashes, digest = [], b"%d" % shift
    values = np.asarray(tokens, np.int64)
    for first in range(0, len(values) - block_tokens + 1, block_tokens):
        digest = hashlib.sha256(digest + values[first : first + block_tokens].tobytes()).digest()
        hashes.append(digest)
    return hashes


def max_blocks(request: GenerationRequest, row: SequenceRequest, block_tokens: int) -> int:
    """Return the most blocks that all slots of a row ever hold, including its encoder's output.

    Beams share the full blocks of their prompt, except with `memory_len`.
    """
    shared = 0 if request.memory_len else row.context_len // block_tokens
    own = -(-request.slot_tokens(row) // block_tokens) - shared
    encoded = len(row.input_ids) if request.encoder_decoder else 0
    return -(-encoded // block_tokens) + shared + request.beam_width * own


def _copies(sources: dict[int, int]) -> dict[int, int]:
    """Return the slots that must copy their source's last block, as another slot takes it over."""
    successors = {source: slot for slot, source in reversed(sources.items())}
    # A slot that continues itself keeps its block: a `Move` to itself would not be a copy.
    successors |= {slot: slot for slot, source in sources.items() if slot == source}
    return {slot: source for slot, source in sources.items() if successors[source] != slot}
