"""Which rows run, and what each step computes: continuous batching with chunked prompts.

Rows join when lanes are free and leave when they finish, between steps. The scheduler belongs to
one thread and does no input or output; `decoder` alone knows how a token is chosen.
"""

# Shapes: n tokens whose logits are wanted, V vocabulary, E hidden

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.decoding.generate import BatchDecoder
from inference.decoding.kv_cache import WIPE, LanePool
from inference.decoding.results import RowResult, RowStep
from inference.decoding.scoring import context_log_prob
from inference.decoding.tensor_fields import Array
from inference.model.step import Segment
from inference.serving.chunking import ChunkSize
from inference.serving.encoder_turn import EncoderTurn
from inference.serving.plan import EncoderRow, Move, StepPlan
from inference.serving.rank import StepResult
from inference.serving.running import (
    GenerationResult,
    GenerationStep,
    RunningRequest,
    RunningRow,
)

logger = logging.getLogger(__name__)


# Prompt tokens of one row whose logits are kept at a time, for rows that want all of them.
_MOST_LOGITS = 128


class RowError(RuntimeError):
    """One row could not be decoded; other rows go on."""


@dataclass(frozen=True)
class _Work:
    """What one row does in a step."""

    row: RunningRow
    lane: int
    ids: list[int]
    outputs: range  # of its tokens here, those whose logits are wanted
    samples: bool  # whether the last of them is for choosing a token

    @property
    def segment(self) -> Segment:
        return Segment(self.lane, self.row.cached, len(self.ids))


@dataclass(frozen=True)
class PlannedStep:
    """A plan with the embeddings that go with it, and whose work it is."""

    plan: StepPlan
    embeddings: torch.Tensor | None  # (plan.embedding_rows, E) fp32
    work: tuple[_Work, ...]
    prompt_tokens: int
    encoding: tuple[RunningRow, ...] = ()  # rows in the encoder
    encoder_layers: int = 0  # that they go through in this step

    @property
    def owners(self) -> list[RunningRequest]:
        """Requests with work in this step, each once."""
        rows = [*self.encoding, *(work.row for work in self.work)]
        return list({id(row.owner): row.owner for row in rows}.values())


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
    ) -> None:
        """Start empty.

        Args:
            decoder: Chooses tokens.
            lanes: Sequences the cache holds.
            embedding_base: First id that names a row of embeddings sent with a step.
            stall_bound_s: How long a step may delay decoding rows for the sake of prompts.
            encoder_layers: Of an encoder-decoder.
        """
        self._decoder = decoder
        self._lanes = LanePool(lanes)
        self._embedding_base = embedding_base
        self._chunk = ChunkSize(stall_bound_s)
        self._requests: list[RunningRequest] = []
        self._moves: list[Move] = []
        self._encoder = EncoderTurn(encoder_layers)

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
        """Take on a request."""
        self._requests.append(request)

    def drop(self, request: RunningRequest) -> None:
        """Forget a request and free its lanes."""
        for row in request.active:
            self._release(row)
        self._encoder.drop(request)
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
        layers = self._encoder.plan(rows, self._chunk.tokens(somebody_waits=bool(work)))
        encoded = self._encoder.ending(layers)
        begun = [row for row in rows if not row.next_ids and _may_start(row, encoded)]
        work += self._prefill(begun, bool(work))
        if not work and not layers:
            assert not rows, "active rows without work"
            return None
        return self._lay_out(sorted(work, key=lambda each: each.lane), layers)

    def finish(self, step: PlannedStep, result: StepResult, *, seconds: float) -> None:
        """Take in what a planned step computed: choose tokens, answer finished requests."""
        if step.prompt_tokens:
            self._chunk.observe(tokens=step.prompt_tokens, seconds=seconds)
        self._encoder.finish(step.encoder_layers)
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
        self._choose(sampling, result.logits)
        self._answer(step.owners)

    def _admit(self) -> None:
        """Give lanes to waiting rows: fewest running rows first, then in order of arrival."""
        while self._lanes.free:
            waiting = [request for request in self._requests if request.waiting]
            if not waiting:
                return
            request = min(waiting, key=lambda r: (len(r.active), r.arrival))
            rows = request.waiting if request.lock_step else request.waiting[:1]
            beams = request.request.beam_width
            lanes = self._lanes.take(beams * len(rows))
            if lanes is None:
                return  # nobody overtakes, so that wide requests get their turn
            for row in list(rows):
                row.lanes, lanes = lanes[:beams], lanes[beams:]
                if row.logits is None:
                    row.handle = self._decoder.add(row.request)
                request.active.append(row)
                request.waiting.remove(row)

    def _prefill(self, rows: list[RunningRow], somebody_waits: bool) -> list[_Work]:
        """Return chunks of prompts for this step."""
        work: list[_Work] = []
        room = self._chunk.tokens(somebody_waits=somebody_waits)
        held = {id(row.owner) for row in rows if row.owner.lock_step and _has_more(row)}
        for row in rows:
            # Rows in lock step keep their last token until all have come so far.
            limit = row.prompt_len - (1 if row.owner.lock_step else 0)
            if row.owner.lock_step and id(row.owner) not in held:
                limit = row.prompt_len
                room = max(room, 1)  # all of them take their last one in the same step
            count = min(room, limit - row.cached)
            if row.wants_prompt_logits:
                count = min(count, _MOST_LOGITS)
            if count <= 0:
                continue
            ids = row.prompt[row.cached : row.cached + count]
            last = row.cached + count == row.prompt_len and row.handle is not None
            outputs = range(count - 1 if last else count, count)
            if row.wants_prompt_logits:
                outputs = range(count)
            work.append(_Work(row, row.lanes[0], ids, outputs, samples=last))
            room -= count
        return work

    def _lay_out(self, work: list[_Work], encoder_layers: int) -> PlannedStep:
        ids: list[int] = []
        outputs: list[int] = []
        rows: list[Array] = []
        for each in work:
            outputs += range(len(ids) + each.outputs.start, len(ids) + each.outputs.stop)
            ids += self._with_sent(each.row, each.ids, rows)
        encoder_ids: list[int] = []
        begins = self._encoder.beginning(encoder_layers)
        for row in begins:
            encoder_ids += self._with_sent(row, row.encoder_ids or [], rows)
        plan = StepPlan(
            ids=ids,
            segments=tuple(each.segment for each in work),
            output_rows=outputs,
            moves=tuple(self._moves),
            has_virtual=any(row.has_virtual for row in begins)
            or any(each.row.has_virtual and not each.row.next_ids for each in work),
            embedding_rows=len(rows),
            pool=any(each.row.wants_pooled and not each.row.next_ids for each in work),
            encoder_rows=tuple(
                EncoderRow(len(row.encoder_ids or ()), tuple(row.lanes), row.request.ia3_task)
                for row in begins
            ),
            encoder_ids=encoder_ids,
            encoder_layers=encoder_layers,
        )
        self._moves.clear()
        embeddings = torch.from_numpy(np.stack(rows)) if rows else None
        prompt_tokens = sum(len(each.ids) for each in work if not each.row.next_ids)
        prompt_tokens += self._encoder.tokens(encoder_layers)
        encoding = tuple(self._encoder.rows) if encoder_layers else ()
        return PlannedStep(plan, embeddings, tuple(work), prompt_tokens, encoding, encoder_layers)

    def _with_sent(self, row: RunningRow, ids: list[int], rows: list[Array]) -> list[int]:
        """Return ids with those of sent embeddings named; the embeddings are added to `rows`."""
        if row.embeddings is None:
            return ids
        named = []
        for token in ids:
            if token < 0:
                rows.append(row.embeddings[-1 - token])
            named.append(token if token >= 0 else self._embedding_base + len(rows) - 1)
        return named

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

    def _choose(self, rows: dict[RunningRow, list[int]], logits: torch.Tensor) -> None:
        if not rows:
            return
        logit_rows = [number for numbers in rows.values() for number in numbers]
        if logit_rows != list(range(len(logits))):
            logits = logits[logit_rows]
        handles = [row.handle for row in rows if row.handle is not None]
        for row, step in zip(rows, self._decoder.step(handles, logits), strict=True):
            self._advance(row, step)

    def _advance(self, row: RunningRow, step: RowStep) -> None:
        """Note a row's newest tokens; release it when it has finished."""
        if step.error is not None:
            row.owner.fail(RowError(f"row {row.index}: {step.error}"))
            row.wipe = True
            return
        if step.finished:
            assert row.handle is not None
            self._retire(row, self._decoder.result(row.handle))
            return
        if not row.next_ids:
            # The beams share the prompt that the first lane holds.
            self._moves += [(row.lanes[0], lane, 0, row.cached) for lane in row.lanes[1:]]
        elif step.parents is not None:
            self._moves += [
                (row.lanes[parent], lane, row.prompt_len, row.cached)
                for lane, parent in zip(row.lanes, step.parents, strict=True)
                if row.lanes[parent] != lane
            ]
        row.next_ids = step.tokens

    def _retire(self, row: RunningRow, result: RowResult) -> None:
        row.owner.results[row.index] = result
        row.owner.active.remove(row)
        self._release(row)

    def _release(self, row: RunningRow) -> None:
        self._lanes.give_back(row.lanes)
        targets = set(row.lanes)
        self._moves = [move for move in self._moves if move[1] not in targets]
        if row.wipe:
            length = row.cached + 1
            self._moves += [(WIPE, lane, 0, length) for lane in row.lanes]
        if row.handle is not None:
            self._decoder.remove(row.handle)

    def _answer(self, owners: Iterable[RunningRequest]) -> None:
        """Answer requests that have finished, and tell the others' listeners of the step."""
        for request in owners:
            if request.future.done():  # cancelled or failed
                self.drop(request)
            elif not request.active and not request.waiting:
                self._requests.remove(request)
                rows = tuple(row for row in request.results if row is not None)
                request.succeed(GenerationResult(rows, tuple(request.pooled)))
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
            request.on_step(GenerationStep(tuple(rows), tuple(request.pooled)))
        except Exception as error:  # the listener's fault costs its own request alone
            logger.exception("a listener failed")
            request.fail(error)
            self.drop(request)


def _decode(row: RunningRow) -> list[_Work]:
    return [
        _Work(row, lane, [token], range(1), samples=True)
        for lane, token in zip(row.lanes, row.next_ids, strict=True)
    ]


def _may_start(row: RunningRow, encoded: Sequence[RunningRow]) -> bool:
    """Whether a row's encoder output is there by now, and its fellows' in lock step."""
    fellows = row.owner.active if row.owner.lock_step else [row]
    return all(fellow.is_encoded or fellow in encoded for fellow in fellows)


def _has_more(row: RunningRow) -> bool:
    """Whether a row has prompt tokens before its last one to compute."""
    return row.cached < row.prompt_len - 1


def _add_pooled(row: RunningRow, pooled: torch.Tensor) -> None:
    row.pooled = pooled if row.pooled is None else row.pooled + pooled
    row.owner.pooled[row.index] = row.pooled.cpu().numpy()
