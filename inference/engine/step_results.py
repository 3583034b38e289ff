"""The effects of a step's results on its rows: scores of prompts, and tokens until they end."""

# Shapes: n tokens whose logits are wanted, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from inference.decoding.generate import BatchDecoder, take_chosen
from inference.decoding.rows import RowStep
from inference.decoding.sampling import SamplingRow
from inference.decoding.tensor_fields import Array
from inference.engine.errors import RowError
from inference.engine.planned_step import GeneratingStep, RowWork
from inference.engine.row_cache import RowCache
from inference.engine.running import RunningRequest, RunningRow
from inference.engine.sessions import Sessions
from inference.ranks.base import StepResult


class StepResults:
    """Gives rows what a step has computed for them; belongs to the scheduler.

    Attributes:
        generated_tokens: Of all answers so far; a token of each beam counts.
    """

    def __init__(self, decoder: BatchDecoder, cache: RowCache, sessions: Sessions) -> None:
        self._decoder, self._cache, self._sessions = decoder, cache, sessions
        self.generated_tokens = 0

    def take(self, step: GeneratingStep, result: StepResult) -> set[RunningRequest]:
        """Process the results of a step; return the requests that have more to report."""
        outputs: list[tuple[RowWork, int]] = []  # work that samples, and its row of logits
        first = 0
        for number, work in enumerate(step.work):
            last = first + len(work.outputs) - 1
            # Rows may have ended, or their clients left, after this step was planned.
            if not work.row.is_released:
                if work.is_prompt:
                    self._take_prompt(work, number, result, slice(first, last + 1))
                if work.samples:
                    outputs.append((work, last))
            first = last + 1
        self._note_tokens(outputs)
        grown: set[RunningRequest] = set()
        if result.chosen is not None:
            chosen = [each for each in outputs if each[0].row.rank_chooses]
            outputs = [each for each in outputs if not each[0].row.rank_chooses]
            grown = self._take_chosen(chosen, result.chosen.array())
        return grown | self._choose(outputs, result.logits)

    def _note_tokens(self, outputs: Sequence[tuple[RowWork, int]]) -> None:
        self.generated_tokens += len(outputs)
        now = perf_counter()
        for work, _ in outputs:
            work.row.owner.times.note_token(now)

    def _take_prompt(self, work: RowWork, number: int, result: StepResult, outputs: slice) -> None:
        """Gather what a chunk of a prompt gives; the last chunk makes it final."""
        row, gathered = work.row, work.row.prompt_outputs
        if gathered.is_final:
            return
        if gathered.wants_pooled and result.pooled is not None:
            gathered.add_pooled(result.pooled[number])
        if gathered.wants_logits:
            first = work.first + 1  # the token that the first row of logits predicts
            next_ids = row.prompt[first : first + len(work.ids)]
            vocab_size = self._decoder.vocab_size
            gathered.add_logits(result.logits[outputs], next_ids, vocab_size=vocab_size)
        if work.first + len(work.ids) == row.prompt_len:
            gathered.commit()
            if gathered.pooled is not None:
                row.owner.pooled[row.index] = gathered.pooled.cpu().numpy()
            assert row.decoded is not None
            row.decoded.prompt = gathered.scores

    def _choose(
        self, outputs: Sequence[tuple[RowWork, int]], logits: torch.Tensor
    ) -> set[RunningRequest]:
        """Choose tokens from rows of logits; return the requests that got any."""
        rows: dict[RunningRow, list[int]] = {}  # row -> its logits, by ascending slot
        for work, number in outputs:
            # All beams start from the prompt's one row of logits.
            beams = len(work.row.slots) if work.is_prompt else 1
            rows.setdefault(work.row, []).extend([number] * beams)
        if not rows:
            return set()
        logit_rows = [number for numbers in rows.values() for number in numbers]
        if logit_rows != list(range(len(logits))):
            logits = logits[logit_rows]
        decoded = [row.decoded for row in rows if row.decoded is not None]
        for row, step in zip(rows, self._decoder.step(decoded, logits), strict=True):
            self._advance(row, step)
        return {row.owner for row in rows}

    def _take_chosen(
        self, outputs: Sequence[tuple[RowWork, int]], chosen: Array
    ) -> set[RunningRequest]:
        """Record the tokens that the rank chose, (n, 2); return the requests to report to."""
        rows = [work.row for work, _ in outputs]
        decoded = [row.decoded for row in rows if isinstance(row.decoded, SamplingRow)]
        steps = take_chosen(decoded, chosen[[number for _, number in outputs]])
        to_report = set()
        for row, step in zip(rows, steps, strict=True):
            if step is not None:
                self._advance(row, step)
            if step is not None or row.owner.on_step is not None:
                to_report.add(row.owner)
        return to_report

    def _advance(self, row: RunningRow, step: RowStep) -> None:
        """Record a row's newest tokens; release it when it has finished."""
        if step.error is not None:
            row.owner.fail(RowError(f"row {row.index}: {step.error}"))
            row.wipe = True
            return
        if step.finished:
            self._retire(row, step)
            return
        if len(row.slots) > 1:
            self._cache.move(row, _parents(row, step))
        row.next_ids = step.tokens

    def _retire(self, row: RunningRow, step: RowStep) -> None:
        """Record the result of a row, and free its slots unless its session goes on."""
        assert row.decoded is not None
        result = row.decoded.result()
        row.owner.results[row.index] = result
        row.owner.active.remove(row)
        if row.owner.session is None:
            self._cache.vacate(row)
            row.end()
            return
        if len(row.slots) > 1:
            # The conversation goes on in the first slot, from the best beam.
            first = row.slots[0]
            self._cache.move(row, {first: _parents(row, step)[first]})
        self._sessions.remember(row, result)
        row.end()


def _parents(row: RunningRow, step: RowStep) -> dict[int, int]:
    """Return the slot whose tokens each slot of a row continues."""
    if not row.next_ids:  # the first slot has computed the prompt
        return dict.fromkeys(row.slots, row.slots[0])
    parents = step.parents or range(len(row.slots))
    return {slot: row.slots[parent] for slot, parent in zip(row.slots, parents, strict=True)}
