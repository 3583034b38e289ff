"""Which rows run, and what each step computes: continuous batching with chunked prompts.

Rows join when lanes are free and leave when they finish, between steps. The scheduler belongs to
one thread and does no input or output; `decoder` alone knows how a token is chosen.
"""

# Shapes: n tokens whose logits are wanted, V vocabulary, E hidden

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch

from inference.decoding.generate import BatchDecoder
from inference.decoding.request import RequestError
from inference.decoding.results import RowStep
from inference.decoding.scoring import context_log_prob
from inference.engine.chunking import ChunkSize, prompt_work
from inference.engine.encoder_turn import EncoderTurn
from inference.engine.errors import EngineBusyError, RowError
from inference.engine.planned_step import EncoderWork, PlannedStep, RowWork, lay_out
from inference.engine.running import (
    GenerationResult,
    GenerationStep,
    RunningRequest,
    RunningRow,
)
from inference.engine.sessions import Sessions
from inference.model.kv_cache import WIPE, LanePool, prefix_source
from inference.ranks.base import StepResult
from inference.ranks.plan import Move

logger = logging.getLogger(__name__)


class Scheduler:
    """The rows of all requests, from waiting to finished."""

    def __init__(
        self,
        decoder: BatchDecoder,
        *,
        lanes: int,
        embedding_base: int,
        stall_bound_s: float,
        encoder_layers: int = 0,
        session_idle_s: float = 60.0,
    ) -> None:
        """Start empty.

        Args:
            decoder: Chooses tokens.
            lanes: Sequences the cache holds.
            embedding_base: First id that names a row of embeddings sent with a step.
            stall_bound_s: How long a step may delay decoding rows for the sake of prompts.
            encoder_layers: Of an encoder-decoder.
            session_idle_s: How long a session may pause.
        """
        self._decoder = decoder
        self._lanes = LanePool(lanes)
        self._embedding_base = embedding_base
        self._chunk = ChunkSize(stall_bound_s)
        self._requests: list[RunningRequest] = []
        self._moves: list[Move] = []
        self._encoder = EncoderTurn(encoder_layers)
        self._sessions = Sessions(idle_s=session_idle_s, free=self._free)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._requests

    @property
    def requests(self) -> list[RunningRequest]:
        """Requests that are not answered yet."""
        return list(self._requests)

    @property
    def waiting_rows(self) -> int:
        """Rows that hold no lanes yet."""
        return sum(request.waiting_rows for request in self._requests)

    @property
    def free_lanes(self) -> int:
        """Lanes nobody holds."""
        return self._lanes.free

    def add(self, request: RunningRequest) -> None:
        """Take on a request, or answer it with why not."""
        if request.turn is not None:
            self.drop_cancelled()  # perhaps the last turn of the same session
            try:
                self._sessions.enter(request, request.turn)
            except RequestError as error:
                if request.turn.ends:
                    self.forget_session(request.turn.session_id)
                request.fail(error)
                return
        self._requests.append(request)
        for row in [row for row in request.waiting if row.lanes]:
            self._activate(row)

    def forget_session(self, session_id: int | str) -> None:
        """End a session whose last turn was refused; may be called from any thread."""
        self._sessions.forget(session_id)

    def drop(self, request: RunningRequest) -> None:
        """Forget a request and free its lanes."""
        for row in request.active:
            self._release(row)
        self._encoder.drop(request)
        self._sessions.drop(request)
        request.active.clear()
        request.waiting.clear()
        self._requests.remove(request)

    def drop_cancelled(self) -> None:
        """Free what clients no longer wait for."""
        for request in [r for r in self._requests if r.future.cancelled()]:
            self.drop(request)

    def plan(self) -> PlannedStep | None:
        """Return the next step, or None if no row can run."""
        self.drop_cancelled()
        self._admit()
        rows = [row for request in self._requests for row in request.active]
        work = [each for row in rows if row.next_ids for each in _decode(row)]
        encoding = self._encoder.plan(rows, self._chunk.tokens(somebody_waits=bool(work)))
        begun = [row for row in rows if not row.next_ids and _may_start(row, encoding)]
        work += prompt_work(begun, self._chunk.tokens(somebody_waits=bool(work)))
        if not work and not encoding.layers:
            assert not rows, "active rows without work"
            return None
        work.sort(key=lambda each: each.lane)
        self._forget(work)
        moves, self._moves = self._moves, []
        return lay_out(work, encoding, moves=moves, embedding_base=self._embedding_base)

    def finish(self, step: PlannedStep, result: StepResult, *, seconds: float) -> None:
        """Take in what a planned step computed: choose tokens, answer finished requests."""
        if step.prompt_tokens:
            self._chunk.observe(tokens=step.prompt_tokens, seconds=seconds)
        self._encoder.finish(step.encoding)
        sampling: dict[RunningRow, list[int]] = {}  # row -> its logits, by ascending lane
        first = 0
        for number, work in enumerate(step.work):
            row, mine = work.row, result.logits[first : first + len(work.outputs)]
            if work.lane == row.lanes[-1] or not row.next_ids:
                row.cached += len(work.ids)
            if row.wants_pooled and not row.next_ids and result.pooled is not None:
                _add_pooled(row, result.pooled[number])
            if row.wants_prompt_logits and not row.next_ids:
                self._score_prompt(row, mine)
            if work.samples:
                # All beams start from the prompt's one row of logits.
                beams = 1 if row.next_ids else len(row.lanes)
                sampling.setdefault(row, []).extend([first + len(work.outputs) - 1] * beams)
            first += len(work.outputs)
        self._choose(sampling, result.logits, result.best)
        self._answer(step.owners)

    def _admit(self) -> None:
        """Give lanes to waiting rows: fewest running rows first, then in order of arrival."""
        self._sessions.expire()
        while waiting := [request for request in self._requests if request.waiting]:
            request = min(waiting, key=lambda r: (len(r.active), r.arrival))
            rows = request.waiting if request.joins_whole else request.waiting[:1]
            beams = request.request.beam_width
            lanes = self._lanes.take(beams * len(rows))
            if lanes is not None:
                for row in list(rows):
                    row.lanes, lanes = lanes[:beams], lanes[beams:]
                    self._activate(row)
            elif beams * len(rows) > self._lanes.total - self._sessions.held_lanes:
                self._refuse(request)
            else:
                return  # nobody overtakes, so that wide requests get their turn

    def _forget(self, work: Sequence[RowWork]) -> None:
        """Make room in lanes that keep fewer tokens than their conversation has."""
        forgetful = [each for each in work if each.row.memory_len is not None]
        excess = {each.row: _excess(each) for each in forgetful}
        for each in forgetful:
            if count := excess[each.row]:
                self._moves.append((each.lane, each.lane, count, each.row.held))
        for row, count in excess.items():
            row.forgotten += count

    def _activate(self, row: RunningRow) -> None:
        """Let a row that has its lanes take part in steps."""
        if row.logits is None:
            row.handle = self._decoder.add(row.request)
        row.owner.waiting.remove(row)
        row.owner.active.append(row)
        if row.owner.session is not None:
            row.owner.session.holds_lanes = True
        if row.prefix_task is not None:
            self._moves.append((prefix_source(row.prefix_task), row.lanes[0], 0, row.cached))

    def _refuse(self, request: RunningRequest) -> None:
        """Refuse what would wait until a session ends."""
        held, total = self._sessions.held_lanes, self._lanes.total
        request.fail(
            EngineBusyError(
                f"sessions hold {held} of the {total} sequences that the cache holds; end one, "
                "wait until one has paused for too long, or raise max_lanes or kv_cache_bytes"
            )
        )
        self.drop(request)

    def _score_prompt(self, row: RunningRow, logits: torch.Tensor) -> None:
        """Keep or score the logits (n, V) of the prompt tokens that were just computed."""
        if row.logits is not None:
            row.logits.append(logits)
            return
        first = row.cached - len(logits) + 1  # the token that the first row of logits predicts
        following = row.prompt[first : first + len(logits)]
        if following and row.handle is not None:
            vocab_size = self._decoder.config.vocab_size
            score = context_log_prob(logits[: len(following)], following, vocab_size=vocab_size)
            self._decoder.add_context_log_prob(row.handle, score)

    def _choose(
        self, rows: dict[RunningRow, list[int]], logits: torch.Tensor, best: torch.Tensor | None
    ) -> None:
        if not rows:
            return
        logit_rows = [number for numbers in rows.values() for number in numbers]
        if logit_rows != list(range(len(logits))):
            logits, best = logits[logit_rows], None
        handles = [row.handle for row in rows if row.handle is not None]
        for row, step in zip(rows, self._decoder.step(handles, logits, best), strict=True):
            self._advance(row, step)

    def _advance(self, row: RunningRow, step: RowStep) -> None:
        """Note a row's newest tokens; release it when it has finished."""
        if step.error is not None:
            row.owner.fail(RowError(f"row {row.index}: {step.error}"))
            row.wipe = True
            return
        if step.finished:
            self._retire(row, step)
            return
        if not row.next_ids:
            # The beams share the prompt that the first lane holds.
            self._moves += [(row.lanes[0], lane, 0, row.held) for lane in row.lanes[1:]]
        elif step.parents is not None:
            self._moves += [
                (row.lanes[parent], lane, row.held_prompt, row.held)
                for lane, parent in zip(row.lanes, step.parents, strict=True)
                if row.lanes[parent] != lane
            ]
        row.next_ids = step.tokens

    def _retire(self, row: RunningRow, step: RowStep) -> None:
        """Note the result of a row, and free its lanes unless its session goes on."""
        assert row.handle is not None
        result = self._decoder.result(row.handle)
        row.owner.results[row.index] = result
        row.owner.active.remove(row)
        if row.owner.session is None:
            self._release(row)
            return
        if step.parents is not None and step.parents[0] != 0 and row.held > row.held_prompt:
            # The conversation goes on in the first lane, from the best beam.
            best = row.lanes[step.parents[0]]
            self._moves.append((best, row.lanes[0], row.held_prompt, row.held))
        self._decoder.remove(row.handle)
        self._sessions.remember(row, result)

    def _release(self, row: RunningRow) -> None:
        """Free the lanes of a row and forget it."""
        self._free(row.lanes)
        if row.wipe:
            self._moves += [(WIPE, lane, 0, row.held + 1) for lane in row.lanes]
        if row.handle is not None:
            self._decoder.remove(row.handle)

    def _free(self, lanes: Sequence[int]) -> None:
        self._lanes.give_back(lanes)
        self._moves = [move for move in self._moves if move[1] not in lanes]

    def _answer(self, owners: Iterable[RunningRequest]) -> None:
        """Answer requests that have finished, and tell the others' listeners of the step."""
        for request in owners:
            if request.future.done():  # cancelled or failed
                self.drop(request)
            elif not request.active and not request.waiting:
                self._requests.remove(request)
                rows = tuple(row for row in request.results if row is not None)
                if request.session is not None:
                    self._sessions.leave(request)
                request.succeed(GenerationResult(request.request, rows, tuple(request.pooled)))
            elif (probe := request.active[:1]) and probe[0].logits is not None:
                self._answer_probe(request, probe[0])
            elif request.on_step is not None:
                self._tell(request)

    def _answer_probe(self, request: RunningRequest, row: RunningRow) -> None:
        if row.is_prefilled:
            assert row.logits is not None
            request.succeed(torch.cat(row.logits))
            self.drop(request)

    def _tell(self, request: RunningRequest) -> None:
        rows = list(request.results)
        for row in request.active:
            if row.next_ids and row.handle is not None:
                rows[row.index] = self._decoder.result(row.handle)
        if all(row is None for row in rows):
            return
        assert request.on_step is not None
        try:
            request.on_step(GenerationStep(request.request, tuple(rows), tuple(request.pooled)))
        except Exception as error:  # the listener's fault costs its own request alone
            logger.exception("a listener failed")
            request.fail(error)
            self.drop(request)


def _decode(row: RunningRow) -> list[RowWork]:
    return [
        RowWork(row, lane, [token], range(1), samples=True)
        for lane, token in zip(row.lanes, row.next_ids, strict=True)
    ]


def _excess(work: RowWork) -> int:
    """Return how many tokens a lane must forget so that those of a step have room."""
    row = work.row
    assert row.memory_len is not None
    return max(row.held + len(work.ids) - row.memory_len, 0)


def _may_start(row: RunningRow, encoding: EncoderWork) -> bool:
    """Whether a row's encoder output is there by now, and its fellows' in lock step."""
    fellows = row.owner.active if row.owner.lock_step else [row]
    ending = encoding.rows if encoding.ends else ()
    return all(fellow.is_encoded or fellow in ending for fellow in fellows)


def _add_pooled(row: RunningRow, pooled: torch.Tensor) -> None:
    row.pooled = pooled if row.pooled is None else row.pooled + pooled
    row.owner.pooled[row.index] = row.pooled.cpu().numpy()
