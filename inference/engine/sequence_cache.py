"""Allocation of slots and blocks of the cache to sequences, and copies of cached tokens."""

import heapq
from collections.abc import Iterable, Sequence

from export_scripts.families.layout.architecture import Rotary
from inference.engine.blocks import BlockPool, max_blocks, prefix_hashes
from inference.engine.planned_step import Chunk
from inference.engine.sequence import RunningRequest, RunningSequence, SequenceStatus
from inference.model.kv_cache import WIPE, Move, Span, encoder_slot
from inference.model.rotary import position_shift

# A sequence joins only if afterwards each running sequence could take one more block; at most one
# block in this many is set aside for that.
_GROWTH_SHARE = 20


class SequenceCache:
    """Allocates slots and blocks to sequences; used by the scheduler only.

    Attributes:
        slots: Number of slots of the cache.
        free_slots: Free slots, as a heap.
        blocks: The blocks of the cache.
        rotary: The model's rotary embedding, None for models without.
        moves: Cached tokens to copy or wipe before the next step computes.
        shared_tokens: Prompt tokens so far that were found in the cache.
    """

    def __init__(
        self, slots: int, blocks: BlockPool, *, shares_prefixes: bool, rotary: Rotary | None
    ) -> None:
        self.slots, self.blocks, self.rotary = slots, blocks, rotary
        # The lowest slots are taken first, so that busy slots are adjacent.
        self.free_slots = list(range(slots))
        self.moves: list[Move] = []
        self.shared_tokens = 0
        self._shares_prefixes = shares_prefixes

    def could_hold(
        self, sequences: Sequence[RunningSequence], held_slots: int, held_blocks: int
    ) -> bool:
        """Return whether sequences of a request fit next to the slots and blocks of sessions."""
        beams = sequences[0].owner.request.beam_width
        if beams * len(sequences) > self.slots - held_slots:
            return False
        total = self.blocks.total
        return total is None or self._max_blocks(sequences) <= total - held_blocks

    def _max_blocks(self, sequences: Sequence[RunningSequence]) -> int:
        """Return the most blocks that sequences need at once; preemptible ones can take turns."""
        blocks, owner = list(map(self._max_blocks_of, sequences)), sequences[0].owner
        return sum(blocks) if owner.is_pinned or owner.starts_together else max(blocks)

    def _max_blocks_of(self, sequence: RunningSequence) -> int:
        request = sequence.owner.request
        return max_blocks(request, sequence.request, self.blocks.block_tokens)

    def forks(self, sequence: RunningSequence) -> bool:
        """Return whether its beams share blocks; with `memory_len` they do not."""
        paged = self.blocks.total is not None
        beams = sequence.owner.request.beam_width
        return paged and beams > 1 and sequence.table.memory_len is None

    def _has_free_blocks(
        self, sequences: Sequence[RunningSequence], requests: Iterable[RunningRequest]
    ) -> bool:
        """Return whether enough blocks are free for a request's sequences, see `take`."""
        blocks, owner = self.blocks, sequences[0].owner
        if blocks.total is None:
            return True
        others = [running for each in requests for running in each.active if not each.is_pinned]
        shared = sum(map(self._shared_blocks, sequences))
        if owner.is_pinned:
            need = most = self._max_blocks(sequences)
            # Each preemptible sequence must be able to finish alone.
            most += max(map(self._max_blocks_of, others), default=0)
        else:
            need = min(len(others), blocks.total // _GROWTH_SHARE)
            for each in sequences:
                need += blocks.count(each.prompt_len) + blocks.count(each.encoder_len)
            most = max(map(self._max_blocks_of, sequences))
        return need - shared <= blocks.free and most <= blocks.total - blocks.reserved

    def take(
        self, sequences: Sequence[RunningSequence], requests: Iterable[RunningRequest]
    ) -> bool:
        """Give sequences of a request slots and first blocks; return False if too few are free.

        Some blocks stay free for the running sequences of all `requests` to grow.
        """
        beams = sequences[0].owner.request.beam_width
        has_slots = beams * len(sequences) <= len(self.free_slots)
        if not has_slots or not self._has_free_blocks(sequences, requests):
            return False
        for sequence in sequences:
            sequence.table.slots = [heapq.heappop(self.free_slots) for _ in range(beams)]
            if self.blocks.total is not None:
                self._take_blocks(sequence)
        return True

    def _take_blocks(self, sequence: RunningSequence) -> None:
        """Take a sequence's first blocks, after reserving all if it cannot be preempted."""
        blocks, owner, slots = self.blocks, sequence.owner, sequence.slots
        shared = self.share(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self.shared_tokens += shared  # a preempted sequence would find its own blocks
        encoder = encoder_slot(slots, self.slots)
        first, slot_tokens = slots[:1], sequence.prompt_len
        if owner.is_pinned:
            most, encoded = self._max_blocks_of(sequence), blocks.count(sequence.encoder_len)
            blocks.reserve(slots, most - encoded)
            blocks.reserve([encoder], encoded)
            if owner.session is not None:
                owner.session.blocks += most
                if not self.forks(sequence):
                    first, slot_tokens = slots, owner.request.slot_tokens(sequence.request)
        blocks.extend(encoder, sequence.encoder_len)
        for slot in first:
            held = blocks.extend(slot, slot_tokens)
        if not owner.is_pinned:
            sequence.table.capacity = held

    def _shared_blocks(self, sequence: RunningSequence) -> int:
        """Return the number of a waiting prompt's blocks that other sequences hold now."""
        can_share = self._shares_prefixes and sequence.owner.turn is None and sequence.can_share
        if not can_share:
            return 0
        table = sequence.table
        if not table.prefix_hashes:  # without the last token, which is always computed
            tokens, size = sequence.prompt[:-1], self.blocks.block_tokens
            table.prefix_hashes = prefix_hashes(tokens, size, self.shift(sequence))
        return self.blocks.used(table.prefix_hashes)

    def share(self, sequence: RunningSequence) -> int:
        """Let a sequence skip prompt tokens that others have computed; return their number.

        Nothing is shared while the sequence is inside a block, whose contents would have to be
        wiped.
        """
        table, size = sequence.table, self.blocks.block_tokens
        if not table.prefix_hashes or table.cached % size:
            return 0
        first = table.cached // size
        if shared := self.blocks.share(table.slots[0], first, table.prefix_hashes):
            table.registered = first + shared
            table.cached = table.registered * size
        return shared * size

    def register(self, sequence: RunningSequence, tokens: int) -> None:
        """Register the full blocks among a sequence's first `tokens` tokens for sharing."""
        table = sequence.table
        if not table.prefix_hashes:
            return
        full = min(tokens // self.blocks.block_tokens, len(table.prefix_hashes))
        for nth in range(table.registered, full):
            self.blocks.register(table.slots[0], nth, table.prefix_hashes[nth])
        table.registered = max(table.registered, full)

    def shift(self, sequence: RunningSequence) -> int:
        """Return the shift of positions, for the full length if it cannot be preempted."""
        owner, tokens = sequence.owner, sequence.prompt_len
        if owner.session is not None:
            tokens = owner.session.session_len
        elif owner.is_pinned:
            tokens = owner.request.slot_tokens(sequence.request)
        return position_shift(self.rotary, tokens)

    def move(self, sequence: RunningSequence, sources: dict[int, int]) -> None:
        """Let slots of a sequence continue from the slots that `sources` maps them to."""
        table = sequence.table
        if self.forks(sequence):
            self.moves += self.blocks.fork(sources, table.held)
            return
        start = 0
        if sequence.status is SequenceStatus.DECODE:  # all slots hold the same prompt already
            start = max(min(table.cached, sequence.prompt_len) - table.forgotten, 0)
        self.moves += [
            (source, slot, start, table.held) for slot, source in sources.items() if source != slot
        ]

    def drop_oldest(self, chunks: Sequence[Chunk]) -> None:
        """Drop the oldest tokens of slots that would exceed their `memory_len`."""
        excess: dict[RunningSequence, int] = {}
        for chunk in chunks:
            table = chunk.sequence.table
            if table.memory_len is None:
                continue
            count = max(table.held + len(chunk.ids) - table.memory_len, 0)
            excess[chunk.sequence] = count
            if count:
                self.moves.append((chunk.slot, chunk.slot, count, table.held))
        for sequence, count in excess.items():
            sequence.table.forgotten += count

    def release(self, sequence: RunningSequence, *, forget: bool = False) -> None:
        """Free a sequence's slots, and wipe them unless their values are known to be finite.

        With `forget`, its blocks are no longer shared.
        """
        table, answer = sequence.table, sequence.answer
        clear = answer.error is not None or not answer.tokens
        own = self.free(table.slots, forget=forget or clear)
        if clear:
            # Sequences that still share a block wipe it if their own answers are not finite.
            ends = dict.fromkeys(table.slots, table.held)
            ends[encoder_slot(table.slots, self.slots)] = sequence.encoder_len
            self.moves += [
                (WIPE, slot, first, min(stop, ends[slot]))
                for slot, first, stop in own
                if first < ends[slot]
            ]

    def free(self, slots: Sequence[int], *, forget: bool = False) -> list[Span]:
        """Free slots; return the result of `BlockPool.release`."""
        for slot in slots:
            assert slot not in self.free_slots, f"slot {slot} is free already"
            heapq.heappush(self.free_slots, slot)
        self.moves = [move for move in self.moves if move[1] not in slots or move[0] == WIPE]
        every = [*slots, encoder_slot(slots, self.slots)]
        return self.blocks.release(every, forget=forget)

    def take_moves(self) -> list[Move]:
        """Return and clear the collected moves."""
        moves, self.moves = self.moves, []
        return moves
