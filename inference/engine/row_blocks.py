"""The blocks of rows: how many they need, whether they are free, and which they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from export_scripts.families.layout.architecture import Rotary
from inference.engine.blocks import BlockPool, beginnings, most_blocks
from inference.engine.running import RunningRequest, RunningRow
from inference.model.kv_cache import encoder_slot
from inference.model.rotary import position_shift

# A row joins only if each running row could take one more block, up to one in so many of the cache.
_GROWTH_SHARE = 20


class RowBlocks:
    """Gives the blocks of a cache to rows; belongs to the scheduler.

    Attributes:
        shared_tokens: Of all prompts, how many others had computed.
    """

    def __init__(
        self, pool: BlockPool, *, slots: int, shares_prefixes: bool, rotary: Rotary | None
    ) -> None:
        self._blocks, self._slots = pool, slots
        self._shares_prefixes, self._rotary = shares_prefixes, rotary
        self.shared_tokens = 0

    def hold(self, request: RunningRequest, rows: Sequence[RunningRow], *, held: int) -> bool:
        """Return whether the cache could hold rows of a request next to `held` blocks."""
        total = self._blocks.total
        return total is None or self._most_blocks(request, rows) <= total - held

    def _most_blocks(self, request: RunningRequest, rows: Sequence[RunningRow]) -> int:
        """Return the most blocks that rows need at once; preemptible ones may run one by one."""
        each = [self._row_blocks(row) for row in rows]
        return sum(each) if request.stays or request.joins_whole else max(each)

    def _row_blocks(self, row: RunningRow) -> int:
        """Return the most blocks that all slots of a row ever hold."""
        session = row.owner.session
        return most_blocks(
            row.owner.request.beam_width,
            shared_tokens=row.prompt_len if self.forks(row) else 0,
            tokens=row.most_tokens if session is None else session.slot_tokens,
            block_tokens=self._blocks.block_tokens,
        ) + self._blocks.count(row.encoder_len)

    def forks(self, row: RunningRow) -> bool:
        """Return whether a row's beams share blocks; those of a session that forgets do not."""
        paged = self._blocks.total is not None
        return paged and row.owner.request.beam_width > 1 and row.memory_len is None

    def are_free(
        self,
        request: RunningRequest,
        rows: Sequence[RunningRow],
        requests: Iterable[RunningRequest],
    ) -> bool:
        """Return whether rows can join now, with room for those of all `requests` to grow."""
        blocks = self._blocks
        if blocks.total is None:
            return True
        others = [row for each in requests for row in each.active if not each.stays]
        shared = sum(self._shared_blocks(row) for row in rows)
        if request.stays:
            need = most = self._most_blocks(request, rows)
            # Each preemptible row must be able to finish alone.
            most += max((self._row_blocks(row) for row in others), default=0)
        else:
            need = sum(blocks.count(row.prompt_len) + blocks.count(row.encoder_len) for row in rows)
            need += min(len(others), blocks.total // _GROWTH_SHARE)
            most = max(self._row_blocks(row) for row in rows)
        return need - shared <= blocks.free and most <= blocks.total - blocks.reserved

    def take(self, row: RunningRow) -> None:
        """Reserve the blocks of a row that keeps them, and give its slots the first of them."""
        blocks, session = self._blocks, row.owner.session
        if blocks.total is None:
            return
        if row.beginnings:
            self._share_beginning(row)
        encoder = encoder_slot(row.slots, self._slots)
        if not row.owner.stays:
            blocks.extend(encoder, row.encoder_len)
            row.room = blocks.extend(row.slots[0], row.prompt_len)
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
            blocks.extend(slot, session.slot_tokens)

    def _shared_blocks(self, row: RunningRow) -> int:
        """Return the number of blocks of a waiting row's prompt that other rows hold now."""
        if not self._shares_prefixes or row.owner.turn is not None or not row.can_share:
            return 0
        if not row.beginnings:  # all of the prompt but its last token, which is computed always
            size = self._blocks.block_tokens
            row.beginnings = beginnings(row.prompt[:-1], size, self.shift(row))
        return self._blocks.used(row.beginnings)

    def _share_beginning(self, row: RunningRow) -> None:
        row.cached = self._blocks.share(row.slots[0], row.beginnings)
        row.remembered = row.cached // self._blocks.block_tokens
        if row.decoded is None:  # others than itself, before it was preempted, have computed them
            self.shared_tokens += row.cached

    def remember(self, row: RunningRow) -> None:
        """Register the full blocks of a row's prompt for sharing."""
        full = min(row.cached // self._blocks.block_tokens, len(row.beginnings))
        for nth in range(row.remembered, full):
            self._blocks.remember(row.slots[0], nth, row.beginnings[nth])
        row.remembered = max(row.remembered, full)

    def shift(self, row: RunningRow) -> int:
        """Return the shift of a row's positions; rows that stay have that of their longest."""
        session = row.owner.session
        tokens = row.prompt_len
        if session is not None:
            tokens = session.session_len
        elif row.owner.stays:
            tokens = row.most_tokens
        return position_shift(self._rotary, tokens)
