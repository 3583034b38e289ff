"""Scheduler of generation: continuous batching with chunked prompts.

Rows join when slots are free and leave when they finish, between steps. The scheduler belongs to
one thread and does no input or output; `sampler` chooses the tokens.
"""

import logging
import sys
from collections import deque
from collections.abc import Container, Iterable, Sequence
from time import perf_counter

import numpy as np
import torch

from inference.decoding.answer import GrowingAnswer
from inference.decoding.rows import RequestError, RowRequest, RowResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling import SampledAnswer
from inference.decoding.tensor_fields import Array
from inference.engine.errors import EngineBusyError, RowError
from inference.engine.load import EngineLoad, RequestTimes
from inference.engine.planned_step import GeneratingStep, RowWork, lay_out
from inference.engine.queued_request import StepScheduler
from inference.engine.row_cache import RowCache
from inference.engine.running import GenerationResult, GenerationStep, RunningRequest, RunningRow
from inference.engine.sessions import Sessions
from inference.engine.step_budget import ChunkSize, EncoderProgress, decoding_work, prompt_work
from inference.model.kv_cache import prefix_source
from inference.model.rotary import position_shift
from inference.model.token_feed import NEWEST
from inference.ranks.base import StepResult

logger = logging.getLogger(__name__)

_NEWEST = (NEWEST,)


class Scheduler(StepScheduler[RunningRequest]):
    """The rows of all requests, from waiting to finished."""

    def __init__(
        self,
        sampler: Sampler,
        cache: RowCache,
        *,
        embedding_base: int,
        chunk: ChunkSize,
        encoder_layers: int = 0,
        session_idle_s: float = 60.0,
        ranks_choose: bool = False,
    ) -> None:
        """Start empty; with `ranks_choose` ranks can choose tokens, which lets steps overlap."""
        super().__init__()
        self._sampler, self._cache = sampler, cache
        self._embedding_base = embedding_base
        self._chunk = chunk
        self._ranks_choose = ranks_choose
        self._shifts = position_shift(cache.rotary, sys.maxsize) > 0
        self._cancelled: deque[RunningRequest] = deque()  # by any thread
        self._encoder = EncoderProgress(encoder_layers)
        self._sessions = Sessions(idle_s=session_idle_s, free=cache.free)
        self._begun_tokens = self._generated_tokens = 0

    def load(self) -> EngineLoad:
        """Return how much runs; may be called from any thread."""
        cache, blocks = self._cache, self._cache.blocks
        return EngineLoad(
            running=cache.slots - len(cache.free_slots),
            slots=cache.slots,
            blocks=blocks.total or 0,
            blocks_used=(blocks.total or 0) - blocks.free,
            prompt_tokens=self._begun_tokens,
            shared_tokens=self._cache.shared_tokens,
            generated_tokens=self._generated_tokens,
        )

    def add(self, request: RunningRequest) -> None:
        """Add a request, or fail it with the reason."""
        if request.turn is not None:
            self.drop_cancelled()  # perhaps the last turn of the same session
            if not request.waiting:  # in place of a refused last turn
                self._sessions.forget(request.turn.session_id)
                return
            try:
                self._sessions.enter(request, request.turn)
            except RequestError as error:
                if request.turn.ends:
                    self._sessions.forget(request.turn.session_id)
                request.fail(error)
                return
        self.requests[request] = None
        request.future.add_done_callback(
            lambda future: self._cancelled.append(request) if future.cancelled() else None
        )
        for row in [row for row in request.waiting if row.slots]:
            if self._cache.forks(row):
                self._cache.blocks.extend(row.slots[0], row.prompt_len)
            self._activate(row)

    def drop(self, request: RunningRequest) -> None:
        """Drop a request and free its slots."""
        for row in request.active:
            # The results of a failed step must not be shared.
            self._cache.vacate(row, forget=True)
        for row in [*request.active, *request.waiting]:
            row.end()
        self._encoder.drop(request.active)
        if request.session is not None:  # whose state is unknown
            self._sessions.end(request.session)
        request.active.clear()
        request.waiting.clear()
        del self.requests[request]

    def drop_cancelled(self) -> None:
        """Drop cancelled requests."""
        while self._cancelled:
            request = self._cancelled.popleft()
            if request in self.requests:
                self.drop(request)

    def plan(self, *, under_way: bool = False) -> GeneratingStep | None:
        """Return the next step, or None if nothing can run, perhaps until the last is finished."""
        self.drop_cancelled()
        if not self._restart_outgrown(under_way=under_way):
            return None
        self._admit()
        rows = [row for request in self.requests for row in request.active]
        if not self._extend_or_preempt(rows, under_way=under_way):
            return None
        work = [each for row in rows if row.needs_step for each in decoding_work(row)]
        work.sort(key=lambda each: each.slot)
        budget = self._chunk.tokens(somebody_waits=bool(work))
        encoding = self._encoder.plan(rows, budget)
        begun = [row for row in rows if not row.next_ids and _may_start(row)]
        work += prompt_work(begun, budget, self._cache)
        if not work and not encoding.layers:
            assert not rows or under_way, "active rows without work"
            return None
        self._cache.forget_oldest(work)
        step = lay_out(
            work,
            encoding,
            moves=self._cache.take_moves(),
            entries=self._cache.blocks.take_entries(),
            ranks_choose=self._ranks_choose,
            embedding_base=self._embedding_base,
        )
        # The rows are as if the step had run: cached tokens, and tokens the rank chooses.
        chooses = step.plan.choices is not None
        for each in work:
            row = each.row
            if each.is_prompt or each.slot == row.slots[-1]:
                row.cached += len(each.ids)
                row.produced += each.samples
            if chooses and each.samples and row.rank_chooses:
                row.next_ids = _NEWEST
        for row in rows:
            row.is_cached = True
        return step

    def finish(self, step: GeneratingStep, result: StepResult, *, seconds: float) -> None:
        """Process the results of a planned step: choose tokens, answer finished requests."""
        if step.prompt_tokens:
            self._chunk.observe(tokens=step.prompt_tokens, seconds=seconds)
        grown = self._take(step, result)
        # Requests without a listener that only got a token from a rank need no report.
        self._answer(step.owners if step.plan.with_logits else grown, grown)

    def _take(self, step: GeneratingStep, result: StepResult) -> set[RunningRequest]:
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
        self._generated_tokens += len(outputs)
        now = perf_counter()
        for work, _ in outputs:
            work.row.owner.times.note_token(now)
        grown: set[RunningRequest] = set()
        if result.chosen is not None:
            chosen = [each for each in outputs if each[0].row.rank_chooses]
            outputs = [each for each in outputs if not each[0].row.rank_chooses]
            grown = self._take_chosen(chosen, result.chosen.array())
        return grown | self._choose(outputs, result.logits)

    def _take_prompt(self, work: RowWork, number: int, result: StepResult, outputs: slice) -> None:
        """Gather what a chunk of a prompt gives; the last chunk makes it final."""
        row, gathered = work.row, work.row.prompt_outputs
        if gathered.wants_pooled and result.pooled is not None:
            gathered.add_pooled(result.pooled[number])
        if gathered.wants_logits:
            first = work.first + 1  # the token that the first row of logits predicts
            next_ids = row.prompt[first : first + len(work.ids)]
            vocab_size = self._sampler.vocab_size
            gathered.add_logits(result.logits[outputs], next_ids, vocab_size=vocab_size)
        if work.first + len(work.ids) == row.prompt_len:
            gathered.commit()
            assert row.decoded is not None
            row.decoded.prompt = gathered.result

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
        self._sampler.step([row.decoded for row in rows if row.decoded is not None], logits)
        for row in rows:
            self._advance(row)
        return {row.owner for row in rows}

    def _take_chosen(
        self, outputs: Sequence[tuple[RowWork, int]], chosen: Array
    ) -> set[RunningRequest]:
        """Record the tokens that a rank chose; return the requests to report to.

        `chosen` (n, 2) int32 holds the bits of each one's best logit, and the token.
        """
        usable = np.isfinite(chosen[:, 0].copy().view(np.float32)).tolist()
        tokens = chosen[:, 1].tolist()
        to_report = set()
        for work, number in outputs:
            row, answer = work.row, work.row.decoded
            assert isinstance(answer, SampledAnswer)
            if not usable[number]:
                answer.fail()
            else:
                answer.append(tokens[number])
            if answer.is_finished:
                self._advance(row)
            if answer.is_finished or row.owner.on_step is not None:
                to_report.add(row.owner)
        return to_report

    def _advance(self, row: RunningRow) -> None:
        """Go on from a row's newest tokens; release it when it has finished."""
        answer = row.decoded
        assert answer is not None
        if answer.error is not None:
            row.owner.fail(RowError(f"row {row.index}: {answer.error}"))
            row.has_nonfinite = True
        elif answer.is_finished:
            self._retire(row, answer)
        else:
            if len(row.slots) > 1:
                self._cache.move(row, _parents(row, answer))
            row.next_ids = answer.tokens

    def _retire(self, row: RunningRow, answer: GrowingAnswer) -> None:
        """Record the result of a row, and free its slots unless its session goes on."""
        result = answer.result()
        row.owner.results[row.index] = result
        row.owner.active.remove(row)
        if row.owner.session is None:
            self._cache.vacate(row)
        else:
            if len(row.slots) > 1:
                # The conversation goes on in the first slot, from the best beam.
                first = row.slots[0]
                self._cache.move(row, {first: _parents(row, answer)[first]})
            self._sessions.remember(row, result)
        row.end()

    def _admit(self) -> None:
        """Give slots to waiting rows: fewest running rows first, then in order of arrival."""
        self._sessions.expire()
        while request := self._first_waiting():
            rows = request.waiting if request.joins_whole else request.waiting[:1]
            if not self._cache.could_hold(rows, *self._sessions.held):
                if not self._sessions.give_up_abandoned():
                    self._refuse(request)
                continue
            if not self._cache.take(rows, self.requests):
                return  # no overtaking: wide requests would starve
            for row in list(rows):
                self._activate(row)

    def _first_waiting(self) -> RunningRequest | None:
        """Return the request whose row joins next."""
        waiting = (request for request in self.requests if request.waiting)
        idle = next((request for request in waiting if not request.active), None)
        if idle is not None:
            return idle
        waiting = (request for request in self.requests if request.waiting)
        return min(waiting, key=lambda r: (len(r.active), r.arrival), default=None)

    def _extend_or_preempt(self, rows: list[RunningRow], *, under_way: bool) -> bool:
        """Give decoding rows the blocks of their next tokens; the newest rows are preempted.

        Preempted rows leave `rows`. False if the running step must be finished first: the tokens
        it chooses are among those that a preempted row computes again.
        """
        blocks = self._cache.blocks
        growing = [row for row in rows if row.held >= row.capacity and row.needs_step]
        while len(growing) > blocks.free:
            if under_way:
                return False
            newest = max(
                (row for row in rows if not row.owner.stays),
                key=lambda row: (row.owner.arrival, row.index),
            )
            self._preempt(newest)
            rows.remove(newest)
            growing = [row for row in growing if row is not newest]
        for row in growing:
            row.capacity = blocks.extend(row.slots[0], row.held + 1)
        return True

    def _restart_outgrown(self, *, under_way: bool) -> bool:
        """Begin rows again whose next token exceeds what their keys were rotated for.

        False if the running step must be finished first, see `_extend_or_preempt`.
        """
        rows = [
            row
            for request in (self.requests if self._shifts else ())
            for row in request.active
            if not request.stays and row.needs_step
            if row.shift != position_shift(self._cache.rotary, row.cached + 1)
        ]
        if rows and under_way:
            return False
        for row in rows:
            self._preempt(row)
        return True

    def _preempt(self, row: RunningRow) -> None:
        """Preempt a row: free its slot and blocks; it waits, and computes its tokens again."""
        logger.debug("a row of %d tokens is preempted", row.cached)
        self._encoder.drop([row])
        self._cache.vacate(row)
        row.preempt()
        row.owner.active.remove(row)
        row.owner.waiting.insert(0, row)

    def _activate(self, row: RunningRow) -> None:
        row.shift = self._cache.shift(row)
        if row.decoded is None:
            row.decoded = self._sampler.begin(row.request)
            row.rank_chooses = row.decoded.rank_chooses
            self._begun_tokens += len(row.request.input_ids)
        row.owner.times.began = row.owner.times.began or perf_counter()
        row.owner.waiting.remove(row)
        row.owner.active.append(row)
        if row.owner.session is not None:
            row.owner.session.holds_slots = True
        if row.prefix_task is not None:
            self._cache.moves.append((prefix_source(row.prefix_task), row.slots[0], 0, row.cached))

    def _refuse(self, request: RunningRequest) -> None:
        """Fail requests that would wait until a session ends."""
        blocks = self._cache.blocks
        held_slots, held_blocks = self._sessions.held
        held = f"{held_slots} of the {self._cache.slots} sequences"
        if blocks.total is not None:
            tokens = held_blocks * blocks.block_tokens
            held += f", and {tokens} of the {blocks.total * blocks.block_tokens} tokens,"
        request.fail(
            EngineBusyError(
                f"sessions hold {held} that the cache holds; end one, wait until one has paused "
                "for too long, or raise max_lanes or kv_cache_bytes"
            )
        )
        self.drop(request)

    def _answer(self, owners: Iterable[RunningRequest], grown: Container[RunningRequest]) -> None:
        """Answer requests that have finished, and report those that have `grown`."""
        for request in owners:
            if request not in self.requests:
                continue
            if request.future.done():  # cancelled or failed
                self.drop(request)
            elif not request.active and not request.waiting:
                del self.requests[request]
                rows = tuple(row for row in request.results if row is not None)
                if request.session is not None:
                    self._sessions.leave(request)
                _note_end(request.times, request.request.rows, rows)
                request.succeed(GenerationResult(request.request, rows, request.times))
            elif request.on_step is not None and request in grown:
                self._report(request)

    def _report(self, request: RunningRequest) -> None:
        rows = list(request.results)
        for row in [*request.active, *request.waiting]:
            if row.decoded is not None and row.has_tokens:
                rows[row.index] = row.decoded.result()
        if all(row is None for row in rows):
            return
        assert request.on_step is not None
        try:
            request.on_step(GenerationStep(request.request, tuple(rows)))
        except Exception as error:  # the listener's fault costs its own request alone
            logger.exception("a listener failed")
            request.fail(error)
            self.drop(request)


def _note_end(times: RequestTimes, asked: Sequence[RowRequest], rows: Sequence[RowResult]) -> None:
    times.prompt_tokens = sum(len(row.input_ids) for row in asked)
    times.generated_tokens = sum(len(ids) for row in rows for ids in row.output_ids)
    times.reasons = tuple(each or "length" for row in rows for each in row.finish_reasons)


def _may_start(row: RunningRow) -> bool:
    """Return whether a row's encoder output is available, in lock step that of all rows."""
    fellows = row.owner.active if row.owner.lock_step else [row]
    return all(fellow.is_encoded for fellow in fellows)


def _parents(row: RunningRow, answer: GrowingAnswer) -> dict[int, int]:
    """Return the slot whose tokens each slot of a row continues."""
    if not row.next_ids:  # the first slot has computed the prompt
        return dict.fromkeys(row.slots, row.slots[0])
    parents = answer.parents or range(len(row.slots))
    return {slot: row.slots[parent] for slot, parent in zip(row.slots, parents, strict=True)}
