"""The place of rows in the cache: their slots, the blocks of these, and the moves of tokens."""

import heapq
from collections.abc import Iterable, Sequence

from export_scripts.families.layout.architecture import Rotary
from inference.engine.blocks import BlockPool, most_blocks, prefix_hashes
from inference.engine.planned_step import RowWork
from inference.engine.running import RunningRequest, RunningRow
from inference.model.kv_cache import WIPE, Move, encoder_slot
from inference.model.rotary import position_shift

# A row joins only if each running row could take one more block, up to one in so many of the cache.
_GROWTH_SHARE = 20


class RowCache:
    """Gives slots and blocks to rows; belongs to the scheduler.

    Attributes:
        slots: How many there are.
        free_slots: Those that no row holds, as a heap.
        blocks: Of the cache.
        rotary: What positions are rotated by, None where they are not.
        moves: What the next step copies and wipes first.
        shared_tokens: Of all prompts, how many others had computed.
    """

    def __init__(
        self, slots: int, blocks: BlockPool, *, shares_prefixes: bool, rotary: Rotary | None
    ) -> None:
        self.slots, self.blocks, self.rotary = slots, blocks, rotary
        # The lowest are taken first, which keeps busy slots side by side.
        self.free_slots = list(range(slots))
        self.moves: list[Move] = []
        self.shared_tokens = 0
        self._shares_prefixes = shares_prefixes

    def could_hold(self, rows: Sequence[RunningRow], held_slots: int, held_blocks: int) -> bool:
        """Return whether rows of a request fit next to what sessions hold."""
        if rows[0].owner.request.beam_width * len(rows) > self.slots - held_slots:
            return False
        total = self.blocks.total
        return total is None or self._most_blocks(rows) <= total - held_blocks

    def _most_blocks(self, rows: Sequence[RunningRow]) -> int:
        """Return the most blocks that rows need at once; preemptible ones may run one by one."""
        each, owner = list(map(self._row_blocks, rows)), rows[0].owner
        return sum(each) if owner.stays or owner.joins_whole else max(each)

    def _row_blocks(self, row: RunningRow) -> int:
        return most_blocks(row.owner.request, row.request, self.blocks.block_tokens)

    def forks(self, row: RunningRow) -> bool:
        """Return whether a row's beams share blocks; those of a session that forgets do not."""
        paged = self.blocks.total is not None
        return paged and row.owner.request.beam_width > 1 and row.memory_len is None

    def _are_free(self, rows: Sequence[RunningRow], requests: Iterable[RunningRequest]) -> bool:
        """Return whether the blocks of a request's rows are free, see `take`."""
        blocks, request = self.blocks, rows[0].owner
        if blocks.total is None:
            return True
        others = [row for each in requests for row in each.active if not each.stays]
        shared = sum(self._shared_blocks(row) for row in rows)
        if request.stays:
            need = most = self._most_blocks(rows)
            # Each preemptible row must be able to finish alone.
            most += max((self._row_blocks(row) for row in others), default=0)
        else:
            need = sum(blocks.count(row.prompt_len) + blocks.count(row.encoder_len) for row in rows)
            need += min(len(others), blocks.total // _GROWTH_SHARE)
            most = max(self._row_blocks(row) for row in rows)
        return need - shared <= blocks.free and most <= blocks.total - blocks.reserved

    def take(self, rows: Sequence[RunningRow], requests: Iterable[RunningRequest]) -> bool:
        """Give rows of a request slots with their first blocks; False if too few are free.

        The rows of all `requests` keep some room to grow.
        """
        beams = rows[0].owner.request.beam_width
        if beams * len(rows) > len(self.free_slots) or not self._are_free(rows, requests):
            return False
        for row in rows:
            row.slots = [heapq.heappop(self.free_slots) for _ in range(beams)]
            self._take_blocks(row)
        return True

    def _take_blocks(self, row: RunningRow) -> None:
        """Reserve the blocks of a row that keeps them, and give its slots the first of them."""
        blocks, session = self.blocks, row.owner.session
        if blocks.total is None:
            return
        shared = self.share(row)
        if row.decoded is None:  # others than itself, before it was preempted, computed them
            self.shared_tokens += shared
        encoder = encoder_slot(row.slots, self.slots)
        if not row.owner.stays:
            blocks.extend(encoder, row.encoder_len)
            row.capacity = blocks.extend(row.slots[0], row.prompt_len)
            return
        most, encoded = self._row_blocks(row), blocks.count(row.encoder_len)
        blocks.reserve(row.slots, most - encoded)
        blocks.reserve([encoder], encoded)
        blocks.extend(encoder, row.encoder_len)
        if session is not None:
            session.blocks += most
        if session is None or self.forks(row):
            blocks.extend(row.slots[0], row.prompt_len)
            return
        for slot in row.slots:
            blocks.extend(slot, row.owner.request.slot_tokens(row.request))

    def _shared_blocks(self, row: RunningRow) -> int:
        """Return the number of blocks of a waiting row's prompt that other rows hold now."""
        if not self._shares_prefixes or row.owner.turn is not None or not row.can_share:
            return 0
        if not row.prefix_hashes:  # all of the prompt but its last token, which is computed always
            size = self.blocks.block_tokens
            row.prefix_hashes = prefix_hashes(row.prompt[:-1], size, self.shift(row))
        return self.blocks.used(row.prefix_hashes)

    def share(self, row: RunningRow) -> int:
        """Let a row skip what others have computed of its prompt; return these tokens.

        A row within a block goes on: what it has computed there would have to be wiped.
        """
        size = self.blocks.block_tokens
        if not row.prefix_hashes or row.cached % size:
            return 0
        first = row.cached // size
        if shared := self.blocks.share(row.slots[0], first, row.prefix_hashes):
            row.registered = first + shared
            row.cached = row.registered * size
        return shared * size

    def register(self, row: RunningRow, tokens: int) -> None:
        """Register the full blocks among a row's first `tokens` tokens for sharing."""
        if not row.prefix_hashes:
            return
        full = min(tokens // self.blocks.block_tokens, len(row.prefix_hashes))
        for nth in range(row.registered, full):
            self.blocks.register(row.slots[0], nth, row.prefix_hashes[nth])
        row.registered = max(row.registered, full)

    def shift(self, row: RunningRow) -> int:
        """Return the shift of a row's positions; rows that stay have that of their longest."""
        session = row.owner.session
        tokens = row.prompt_len
        if session is not None:
            tokens = session.session_len
        elif row.owner.stays:
            tokens = row.owner.request.slot_tokens(row.request)
        return position_shift(self.rotary, tokens)

    def move(self, row: RunningRow, sources: dict[int, int]) -> None:
        """Let slots of a row go on from the slots that `sources` maps them to."""
        if self.forks(row):
            self.moves += self.blocks.fork(sources, row.held)
            return
        start = 0
        if row.next_ids:  # from then on all share the prompt, as far as they hold it
            start = max(min(row.cached, row.prompt_len) - row.forgotten, 0)
        self.moves += [
            (source, slot, start, row.held) for slot, source in sources.items() if source != slot
        ]

    def forget_oldest(self, work: Sequence[RowWork]) -> None:
        """Make room in slots that keep fewer tokens than their conversation has."""
        excess: dict[RunningRow, int] = {}
        for each in work:
            row = each.row
            if row.memory_len is None:
                continue
            excess[row] = count = max(row.held + len(each.ids) - row.memory_len, 0)
            if count:
                self.moves.append((each.slot, each.slot, count, row.held))
        for row, count in excess.items():
            row.forgotten += count

    def vacate(self, row: RunningRow, *, forget: bool = False) -> None:
        """Free the slots of a row, and clear what they hold unless it is known to be finite.

        With `forget` its blocks are no longer shared.
        """
        clear = row.has_nonfinite or (row.is_cached and not row.has_tokens)
        own = self.free(row.slots, forget=forget or clear)
        if clear:
            # Blocks that others share are theirs to clear, if their answers are not finite either.
            ends = dict.fromkeys(row.slots, row.held)
            ends[encoder_slot(row.slots, self.slots)] = row.encoder_len
            self.moves += [
                (WIPE, slot, first, int(min(stop, ends[slot])))
                for slot, first, stop in own
                if first < ends[slot]
            ]
        row.is_cached = False

    def free(self, slots: Sequence[int], *, forget: bool = False) -> list[tuple[int, int, float]]:
        """Free slots; return what `BlockPool.release` does."""
        for slot in slots:
            assert slot not in self.free_slots, f"slot {slot} is free already"
            heapq.heappush(self.free_slots, slot)
        self.moves = [move for move in self.moves if move[1] not in slots or move[0] == WIPE]
        every = [*slots, encoder_slot(slots, self.slots)]
        return self.blocks.release(every, forget=forget)

    def take_moves(self) -> list[Move]:
        """Return the moves since the last call."""
        moves, self.moves = self.moves, []
        return moves
