"""Ranks that keep token ids in place of keys and values: their tokens show what they see."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tests.reference_choice  # noqa: F401 - ranks choose on CPUs, too
from inference.decoding.tensor_fields import Array
from inference.engine.scheduler import Scheduler
from inference.model.kv_cache import WIPE, Move, encoder_slot
from inference.model.token_feed import NEWEST, TokenFeed
from inference.ranks.base import StepResult
from inference.ranks.plan import EncoderRow, StepPlan

NOTHING = -7


def next_token(tokens: list[int], vocab_size: int) -> int:
    """Return what follows a sequence; every token and its place count."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value % vocab_size


def let_ranks_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of engines on a CPU choose tokens, as those on a GPU do."""

    def scheduler(*given: Any, **named: Any) -> Scheduler:
        return Scheduler(*given, **{**named, "ranks_choose": True})

    monkeypatch.setattr("inference.engine.engine.Scheduler", scheduler)


class FakeRanks:
    """A cache in blocks, and a model that reads a slot's tokens through its table.

    With an encoder a sequence also reads the tokens that were encoded for it, which come first.
    """

    def __init__(
        self,
        *,
        slots: int,
        blocks: int,
        block_tokens: int,
        slot_blocks: int,
        vocab_size: int,
        encoder_layers: int = 0,
    ) -> None:
        self._sequences = slots
        slots += slots + 1 if encoder_layers else 0
        self._cells = np.full((blocks, block_tokens), NOTHING)
        # As in the cache itself, a slot of one block has its own.
        self._tables = (
            np.arange(slots)[:, None] if slot_blocks == 1 else np.full((slots, slot_blocks), -1)
        )
        self._size = block_tokens
        self._newest = np.full(slots, NOTHING)
        self._vocab_size = vocab_size
        self._feed = TokenFeed(self._sequences, torch.device("cpu"), vocab=range(vocab_size))
        self._encoder_layers = encoder_layers
        self._layers_left = 0  # of the pass
        self._pass: tuple[tuple[EncoderRow, ...], Sequence[int]] = ((), ())
        self._encoded: dict[int, tuple[int, int]] = {}  # slot -> slot and length of what it reads
        self.steps = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; tokens are chosen where the plan says so."""
        self.steps += 1
        copies = [move for move in plan.moves if move[0] != WIPE]
        assert all(source != slot for source, slot, _, _ in copies), "a slot forgets its tokens"
        saved = [self._read(source, stop)[start:] for source, _, start, stop in copies]
        for source, slot, start, stop in plan.moves:
            for place in range(start, stop) if source == WIPE else ():
                self._write(slot, place, NOTHING)
        cells = [(slot, place) for slot, place, _ in plan.entries]
        assert len(set(cells)) == len(cells), "a slot gets two blocks for one place"
        for slot, place, block in plan.entries:
            self._tables[slot, place] = block
        for move, tokens in zip(copies, saved, strict=True):
            self._copy(move, tokens)
        if plan.encoder_layers:
            self._encode(plan)
        logits = self._logits(plan)
        chosen = None if plan.choices is None else self._choose(plan, logits.clone())
        return StepResult(logits if plan.with_logits else torch.empty(0, 0), chosen=chosen)

    def _choose(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        choices = torch.tensor(plan.choices, dtype=torch.int64).view(-1, 2)
        assert len(choices) == len(logits)
        for slot, marks in plan.marks:
            self._feed.mark(slot, *marks)
        slots, forbidden = choices.t()
        pairs = self._feed.choose(
            logits,
            torch.where(slots < 0, self._feed.unread, slots),
            forbidden,
            *(
                None if each is None else torch.tensor(each)
                for each in (plan.draws, plan.penalties)
            ),
        )
        chooses = (slots >= 0).numpy()
        self._newest[slots.numpy()[chooses]] = pairs[:, 1].numpy()[chooses]
        return pairs

    def tokens(self, slot: int, stop: int) -> list[int]:
        """Return the first tokens that a slot holds."""
        found: list[int] = self._read(slot, stop).tolist()
        return found

    def _encode(self, plan: StepPlan) -> None:
        if plan.encoder_rows:
            self._pass = plan.encoder_rows, plan.encoder_ids
            self._layers_left = self._encoder_layers
        self._layers_left -= plan.encoder_layers
        assert self._layers_left >= 0
        if self._layers_left:
            return
        ids = iter(self._pass[1])
        for row in self._pass[0]:
            target = encoder_slot(row.slots, self._sequences)
            for place in range(row.tokens):
                self._write(target, place, next(ids))
            self._encoded |= dict.fromkeys(row.slots, (target, row.tokens))

    def _logits(self, plan: StepPlan) -> torch.Tensor:
        rows, first, outputs = [], 0, set(plan.output_rows)
        for segment in plan.segments:
            for nth in range(segment.tokens):
                token = plan.ids[first + nth]
                token = int(self._newest[segment.slot]) if token == NEWEST else token
                assert token != NOTHING, "this token was not chosen"
                self._write(segment.slot, segment.start + nth, token)
                if first + nth in outputs:
                    seen = self._read(segment.slot, segment.start + nth + 1)
                    if self._encoder_layers:
                        seen = np.concatenate((self._read(*self._encoded[segment.slot]), seen))
                    assert NOTHING not in seen, "a token is read that was not written"
                    best = next_token(seen.tolist(), self._vocab_size)
                    rows.append(-((np.arange(self._vocab_size) - best) % self._vocab_size))
            first += segment.tokens
        logits = np.stack(rows).astype(np.float32) if rows else np.empty((0, self._vocab_size))
        return torch.from_numpy(logits).float()

    def _copy(self, move: Move, tokens: Array) -> None:
        _, target, start, _ = move
        for nth, token in enumerate(tokens.tolist()):
            self._write(target, start + nth, token)

    def _write(self, slot: int, place: int, token: int) -> None:
        block = self._tables[slot, place // self._size]
        assert block >= 0, "a token has no block"
        self._cells[block, place % self._size] = token

    def _read(self, slot: int, stop: int) -> Array:
        blocks = self._tables[slot, : -(-stop // self._size)]
        assert (blocks >= 0).all(), "a slot lacks a block"
        return self._cells[blocks].ravel()[:stop]
