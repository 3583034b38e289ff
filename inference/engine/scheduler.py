"""Scheduler of generation: continuous batching with chunked prefill.

Between steps, sequences join when slots are free and leave when they finish. Only one thread uses
the scheduler, which does no I/O; `sampler` chooses the tokens.
"""

import logging
import sys
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np
from torch import Tensor

from inference.decoding.answer import UNUSABLE
from inference.decoding.rows import RequestError, SequenceRequest, SequenceResult
from inference.decoding.sampler import Sampler
from inference.decoding.sampling import SampledAnswer
from inference.decoding.tensor_fields import Array
from inference.engine.errors import EngineBusyError, GrammarError, RowError
from inference.engine.load import EngineLoad, RequestTimes
from inference.engine.planned_step import Chunk, GeneratingStep, lay_out
from inference.engine.queued_request import StepScheduler
from inference.engine.sequence import (
    GenerationResult,
    RunningRequest,
    RunningSequence,
    SequenceStatus,
)
from inference.engine.sequence_cache import SequenceCache
from inference.engine.sessions import Sessions
from inference.engine.step_budget import ChunkSize, EncoderProgress, prompt_chunks
from inference.model.kv_cache import prefix_source
from inference.model.rotary import position_shift
from inference.model.token_feed import NEWEST
from inference.ranks.base import StepResult

logger = logging.getLogger(__name__)

_NEWEST = (NEWEST,)


class Scheduler(StepScheduler):
    """The sequences of all requests, from waiting to finished."""

    requests: dict[RunningRequest, None]

    def __init__(
        self,
        sampler: Sampler,
        cache: SequenceCache,
        *,
        embedding_base: int,
        chunk_size: ChunkSize,
        encoder_layers: int = 0,
        session_idle_s: float = 60.0,
        ranks_choose: bool = False,
    ) -> None:
        """Start empty; with `ranks_choose` the ranks can choose tokens, so that steps overlap."""
        super().__init__()
        self._sampler, self._cache = sampler, cache
        self._embedding_base = embedding_base
        self._chunk_size = chunk_size
        self._ranks_choose = ranks_choose
        self._shifts = position_shift(cache.rotary, sys.maxsize) > 0
        self._cancelled: deque[RunningRequest] = deque()  # by any thread
        self._encoder = EncoderProgress(encoder_layers)
        self._sessions = Sessions(idle_s=session_idle_s, free=cache.free)
        self._prompt_tokens = self._generated_tokens = 0

    def load(self) -> EngineLoad:
        """Return the current load; may be called from any thread."""
        cache, blocks = self._cache, self._cache.blocks
        return EngineLoad(
            running=cache.slots - len(cache.free_slots),
            slots=cache.slots,
            blocks=blocks.total or 0,
            blocks_used=(blocks.total or 0) - blocks.free,
            prompt_tokens=self._prompt_tokens,
            shared_tokens=self._cache.shared_tokens,
            generated_tokens=self._generated_tokens,
        )

    def add(self, request: RunningRequest) -> None:
        """Add a request, or fail it with a reason."""
        if request.turn is not None:
            self.drop_cancelled()  # may include the previous turn of this session
            if not request.waiting:  # a refused last turn, which ends its session
                self._sessions.end_refused(request.turn.session_id)
                return
            try:
                self._sessions.begin_turn(request, request.turn)
            except RequestError as error:
                if request.turn.ends:
                    self._sessions.end_refused(request.turn.session_id)
                request.fail(error)
                return
        self.requests[request] = None
        request.future.add_done_callback(
            lambda future: self._cancelled.append(request) if future.cancelled() else None
        )
        for sequence in list(request.waiting):
            sequence.answer = self._sampler.begin(sequence.request)
            if sequence.slots:  # its session has kept them
                if self._cache.forks(sequence):
                    self._cache.blocks.extend(sequence.slots[0], sequence.prompt_len)
                self._activate(sequence)

    def drop(self, request: RunningRequest) -> None:
        """Drop a request and free its slots."""
        for sequence in request.active:
            # Results of a failed step must not be shared.
            self._cache.release(sequence, forget=True)
        for sequence in [*request.active, *request.waiting]:
            sequence.become(SequenceStatus.ABORTED)
        self._encoder.drop(request.active)
        if request.session is not None:  # its cached tokens may be incomplete
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
        """Return the next step, or None if nothing can run (yet, while a step is under way)."""
        self.drop_cancelled()
        if not self._restart_outgrown(under_way=under_way):
            return None
        self._admit()
        running = [sequence for request in self.requests for sequence in request.active]
        if not self._extend_or_preempt(running, under_way=under_way):
            return None
        chunks = [
            Chunk(sequence, slot, [token])
            for sequence in running
            if sequence.needs_step
            for slot, token in zip(sequence.slots, sequence.next_ids, strict=True)
        ]
        chunks.sort(key=lambda chunk: chunk.slot)
        budget = self._chunk_size.tokens(with_decodes=bool(chunks))
        encoding = self._encoder.plan(running, budget)
        prefill = [
            each for each in running if each.status is SequenceStatus.PREFILL and _is_encoded(each)
        ]
        chunks += prompt_chunks(prefill, budget, self._cache)
        if not chunks and not encoding.layers:
            assert not running or under_way, "running sequences without work"
            return None
        self._cache.drop_oldest(chunks)
        step = lay_out(
            chunks,
            encoding,
            moves=self._cache.take_moves(),
            entries=self._cache.blocks.take_entries(),
            ranks_choose=self._ranks_choose,
            embedding_base=self._embedding_base,
        )
        # Advance the sequences as if the step had run, with tokens that only the rank will know.
        chooses = step.plan.choices is not None
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.is_prompt or chunk.slot == sequence.slots[-1]:
                sequence.table.cached += len(chunk.ids)
                sequence.produced += chunk.samples
            if chooses and chunk.samples and sequence.answer.rank_chooses:
                sequence.decode(_NEWEST)
        return step

    def finish(self, step: GeneratingStep, result: StepResult, *, seconds: float) -> None:
        """Process the results of a planned step: choose tokens, answer finished requests."""
        if step.prompt_tokens:
            self._chunk_size.observe(tokens=step.prompt_tokens, seconds=seconds)
        progressed = self._process(step, result)
        # Unfinished requests without `on_step` whose token a rank chose need no report.
        self._answer(step.owners if step.plan.with_logits else progressed, progressed)

    def _process(self, step: GeneratingStep, result: StepResult) -> set[RunningRequest]:
        """Process the results of a step; return the requests with progress to report."""
        sampled: dict[RunningSequence, list[int]] = {}  # sequence -> a row of logits for each slot
        first, now = 0, perf_counter()
        for number, chunk in enumerate(step.chunks):
            sequence, stop = chunk.sequence, first + chunk.outputs
            # The sequence may have ended, or its client left, since this step was planned.
            if not sequence.is_over:
                if chunk.is_prompt:
                    self._collect_prompt(chunk, number, result, slice(first, stop))
                if chunk.samples:
                    # All beams start from the single row of logits of the prompt.
                    beams = len(sequence.slots) if chunk.is_prompt else 1
                    sampled.setdefault(sequence, []).extend([stop - 1] * beams)
                    self._generated_tokens += 1
                    sequence.owner.times.note_token(now)
            first = stop
        progressed: set[RunningRequest] = set()
        if result.chosen is not None:
            by_ranks = [sequence for sequence in sampled if sequence.answer.rank_chooses]
            chosen = {sequence: sampled.pop(sequence)[0] for sequence in by_ranks}
            progressed = self._record_chosen(chosen, result.chosen.numpy())
        return progressed | self._choose(sampled, result.logits)

    def _collect_prompt(self, chunk: Chunk, number: int, result: StepResult, rows: slice) -> None:
        """Collect the outputs of a prompt chunk; the last chunk makes them final."""
        sequence, gathered = chunk.sequence, chunk.sequence.prompt_outputs
        stop = chunk.first + len(chunk.ids)
        if gathered.wants_pooled and result.pooled is not None:
            gathered.add_pooled(result.pooled[number])
        if gathered.wants_logits:
            # Row i of the logits predicts the token that follows token i of the chunk.
            next_ids = sequence.prompt[chunk.first + 1 : stop + 1]
            vocab_size = self._sampler.vocab_size
            gathered.add_logits(result.logits[rows], next_ids, vocab_size=vocab_size)
        if stop == sequence.prompt_len:
            sequence.answer.prompt = gathered.finish()

    def _choose(
        self, sampled: Mapping[RunningSequence, Sequence[int]], logits: Tensor
    ) -> set[RunningRequest]:
        """Choose tokens from rows of logits; return the requests that got tokens."""
        if not sampled:
            return set()
        rows = [row for its_rows in sampled.values() for row in its_rows]
        if rows != list(range(len(logits))):
            logits = logits[rows]
        self._sampler.step([sequence.answer for sequence in sampled], logits)
        for sequence in sampled:
            self._advance(sequence)
        return {sequence.owner for sequence in sampled}

    def _record_chosen(
        self, sampled: Mapping[RunningSequence, int], chosen: Array
    ) -> set[RunningRequest]:
        """Record the tokens that a rank chose; return the requests with progress to report.

        `chosen` (n, 2) int32 holds the fp32 bits of each row's best logit, and the token.
        """
        usable = np.isfinite(chosen[:, 0].copy().view(np.float32)).tolist()
        tokens = chosen[:, 1].tolist()
        to_report = set()
        for sequence, row in sampled.items():
            answer = sequence.answer
            assert isinstance(answer, SampledAnswer)
            if not usable[row]:
                answer.fail()
            else:
                answer.append(tokens[row])
            if answer.is_finished:
                self._advance(sequence)
            if answer.is_finished or sequence.owner.on_step is not None:
                to_report.add(sequence.owner)
        return to_report

    def _advance(self, sequence: RunningSequence) -> None:
        """Continue a sequence with its newest tokens, or retire it if it has finished."""
        answer = sequence.answer
        if answer.error is not None:
            kind = RowError if answer.error == UNUSABLE else GrammarError
            sequence.owner.fail(kind(f"row {sequence.index}: {answer.error}"))
        elif answer.is_finished:
            self._retire(sequence)
        else:
            if len(sequence.slots) > 1:
                self._cache.move(sequence, _parents(sequence))
            sequence.decode(answer.tokens)

    def _retire(self, sequence: RunningSequence) -> None:
        """Record the result of a sequence, and free its slots unless a session keeps them."""
        owner = sequence.owner
        result = owner.results[sequence.index] = sequence.answer.result()
        owner.active.remove(sequence)
        if owner.session is None:
            self._cache.release(sequence)
        else:
            if len(sequence.slots) > 1:
                # The conversation continues in the first slot, from the best beam.
                first = sequence.slots[0]
                self._cache.move(sequence, {first: _parents(sequence)[first]})
            self._sessions.suspend(sequence, result)
        sequence.become(SequenceStatus.FINISHED)

    def _admit(self) -> None:
        """Give slots to waiting sequences: requests with the fewest running ones go first."""
        self._sessions.expire()
        while request := self._first_waiting():
            sequences = request.waiting if request.starts_together else request.waiting[:1]
            if not self._cache.could_hold(sequences, *self._sessions.held):
                if not self._sessions.end_abandoned():
                    self._refuse(request)
                continue
            if not self._cache.take(sequences, self.requests):
                return  # no overtaking, or requests of many sequences would starve
            for sequence in list(sequences):
                self._activate(sequence)

    def _first_waiting(self) -> RunningRequest | None:
        """Return the request whose sequence gets the next slot."""
        waiting = (request for request in self.requests if request.waiting)
        idle = (request for request in self.requests if request.waiting and not request.active)
        return next(idle, None) or min(
            waiting, key=lambda r: (len(r.active), r.arrival), default=None
        )

    def _extend_or_preempt(self, running: list[RunningSequence], *, under_way: bool) -> bool:
        """Give decoding sequences blocks for their next tokens, preempting the newest if necessary.

        Preempted sequences are removed from `running`. Returns False if the step under way must
        finish first: a preempted sequence recomputes the tokens which that step chooses, too.
        """
        blocks = self._cache.blocks
        growing = [
            each for each in running if each.table.held >= each.table.capacity and each.needs_step
        ]
        while growing and len(growing) > blocks.free:
            if under_way:
                return False
            newest = max(
                (sequence for sequence in running if not sequence.owner.is_pinned),
                key=lambda sequence: (sequence.owner.arrival, sequence.index),
            )
            self._preempt(newest)
            running.remove(newest)
            growing = [sequence for sequence in growing if sequence is not newest]
        for sequence in growing:
            table = sequence.table
            table.capacity = blocks.extend(table.slots[0], table.held + 1)
        return True

    def _restart_outgrown(self, *, under_way: bool) -> bool:
        """Preempt sequences whose next token changes the rotation of all their positions.

        Returns False if the step under way must finish first, see `_extend_or_preempt`.
        """
        outgrown = [
            sequence
            for request in (self.requests if self._shifts else ())
            for sequence in request.active
            if not request.is_pinned and sequence.needs_step
            if sequence.table.shift != position_shift(self._cache.rotary, sequence.table.cached + 1)
        ]
        if outgrown and under_way:
            return False
        for sequence in outgrown:
            self._preempt(sequence)
        return True

    def _preempt(self, sequence: RunningSequence) -> None:
        """Free a sequence's slot and blocks; it waits, and recomputes its tokens later."""
        logger.debug("preempted a sequence of %d tokens", sequence.table.cached)
        self._encoder.drop([sequence])
        self._cache.release(sequence)
        sequence.preempt()
        sequence.owner.active.remove(sequence)
        sequence.owner.waiting.insert(0, sequence)

    def _activate(self, sequence: RunningSequence) -> None:
        table, owner = sequence.table, sequence.owner
        table.shift = self._cache.shift(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self._prompt_tokens += len(sequence.request.input_ids)
        sequence.begin()
        owner.times.began = owner.times.began or perf_counter()
        owner.waiting.remove(sequence)
        owner.active.append(sequence)
        if owner.session is not None:
            owner.session.holds_slots = True
        if sequence.prefix_task is not None:
            source = prefix_source(sequence.prefix_task)
            self._cache.moves.append((source, table.slots[0], 0, table.cached))

    def _refuse(self, request: RunningRequest) -> None:
        """Fail a request that could not run before a session ends."""
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

    def _answer(
        self, owners: Iterable[RunningRequest], progressed: Container[RunningRequest]
    ) -> None:
        """Answer requests that have finished, and report the progress of those in `progressed`."""
        for request in owners:
            if request not in self.requests:
                continue
            if request.future.done():  # cancelled or failed
                self.drop(request)
                continue
            if request.on_step is not None and request in progressed and request.is_running:
                self._report(request)
            if request in self.requests and not request.is_running:
                del self.requests[request]
                rows = tuple(row for row in request.results if row is not None)
                if request.session is not None:
                    self._sessions.end_turn(request)
                _record_end(request.times, request.request.rows, rows)
                request.succeed(GenerationResult(request.request, rows, request.times))

    def _report(self, request: RunningRequest) -> None:
        assert request.on_step is not None
        try:
            new = request.new_tokens() if request.only_tokens else request.progress()
            is_enough = request.on_step(new)
        except Exception as error:  # fails this request only
            logger.exception("an on_step callback failed")
            request.fail(error)
            self.drop(request)
            return
        sequences = [*request.active, *request.waiting]
        if is_enough and all(each.status is SequenceStatus.DECODE for each in sequences):
            for sequence in sequences:
                if isinstance(sequence.answer, SampledAnswer):
                    sequence.answer.reason = "stop"
                self._retire(sequence)


def _record_end(
    times: RequestTimes, asked: Sequence[SequenceRequest], rows: Sequence[SequenceResult]
) -> None:
    times.prompt_tokens = sum(len(row.input_ids) for row in asked)
    times.generated_tokens = sum(len(ids) for row in rows for ids in row.output_ids)
    times.reasons = tuple(each or "length" for row in rows for each in row.finish_reasons)


def _is_encoded(sequence: RunningSequence) -> bool:
    """Return whether the encoder has read its input, and in lock step all inputs of its request."""
    needed = sequence.owner.active if sequence.owner.lock_step else [sequence]
    return all(each.status is not SequenceStatus.ENCODE for each in needed)


def _parents(sequence: RunningSequence) -> dict[int, int]:
    """Return the slot whose tokens each slot of a sequence continues."""
    slots = sequence.slots
    if sequence.status is SequenceStatus.PREFILL:  # the first slot has computed the prompt
        return dict.fromkeys(slots, slots[0])
    parents = sequence.answer.parents
    return {slot: slots[parent] for slot, parent in zip(slots, parents, strict=True)}
