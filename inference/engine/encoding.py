"""Requests to an encoder, and the scheduler of their rows.

Rows are independent and stateless: a step takes as many as fit.
"""

# Shapes: B rows, S longest row as the client padded it, E hidden, N tokens of a step

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import (
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from inference.decoding.request import read_batch, unknown_ids
from inference.decoding.rows import RequestError
from inference.decoding.tensor_fields import Array
from inference.engine.queued_request import PlannedStep, QueuedRequest, StepScheduler
from inference.ranks.base import StepResult
from inference.ranks.plan import EncoderRow, StepPlan

# Most tokens of one step; a longer row runs alone. BERT-base on an H200 takes 7.4 ms for 32 rows of
# 384 in steps of 4096, 6.0 ms in a single step.
_STEP_TOKENS = 4096
_GPU_STEP_TOKENS = 16384


@dataclass(frozen=True)
class EncodingRow:
    """One row without padding: token ids, or hidden states (tokens, E) fp32."""

    ids: tuple[int, ...]
    states: Array | None = None
    task: int | None = None

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids) if self.states is None else len(self.states)


@dataclass(frozen=True)
class EncodingRequest:
    """All rows of one client request, padded by the client to `width` tokens."""

    rows: tuple[EncodingRow, ...]
    width: int
    attentions: bool = False


@dataclass(frozen=True)
class EncodingResult:
    """The answer, zero beyond each row's length.

    `hidden` is (B, S, E) fp32; `attentions`, if asked for, (B, layers, heads, S, S) fp32.
    """

    hidden: Tensor
    attentions: Tensor | None = None


def parse_encoding(
    tensors: Mapping[str, Array], architecture: EncoderArchitecture | EncoderDecoderArchitecture
) -> EncodingRequest:
    """Return the checked request, from tensors by name with rows as their first axis.

    Raises:
        RequestError: With every problem found.
    """
    if isinstance(architecture, EncoderArchitecture):
        return _parse_states(tensors, architecture.hidden)
    return _parse_ids(tensors, architecture)


def _parse_states(tensors: Mapping[str, Array], hidden: int) -> EncodingRequest:
    states, fields = read_batch(
        tensors,
        ("input_hidden_state", "sequence_lengths"),
        kinds="f",
        hidden=(hidden,),
    )
    lengths = fields.lengths("sequence_lengths", width=states.shape[1])
    if not fields.problems:
        fields.problems += [
            f"input_hidden_state[{b}]: holds values that are not finite"
            for b, length in enumerate(lengths)
            if not np.isfinite(states[b, :length]).all()
        ]
    if fields.problems:
        raise RequestError(fields.problems)
    rows = [EncodingRow((), states[b, :length]) for b, length in enumerate(lengths)]
    return EncodingRequest(tuple(rows), states.shape[1])


def _parse_ids(
    tensors: Mapping[str, Array], architecture: EncoderDecoderArchitecture
) -> EncodingRequest:
    optional = ("is_return_attentions", "ia3_tasks")
    ids, fields = read_batch(tensors, ("input_ids", "sequence_length"), optional)
    lengths = fields.lengths("sequence_length", width=ids.shape[1])
    tasks = fields.ia3_tasks(architecture.ia3_num_tasks)
    # Attentions are returned for the whole batch if any row asks for them.
    attentions = any(fields.numbers("is_return_attentions", default=False))
    limit = architecture.max_pos_seq_len
    for b, length in enumerate(lengths):
        fields.problems += unknown_ids(b, ids[b, :length].tolist(), architecture.vocab_size)
        if limit is not None and length > limit:
            fields.problems.append(f"input_ids[{b}]: {length} exceeds max_pos_seq_len ({limit})")
    if fields.problems:
        raise RequestError(fields.problems)
    rows = [
        EncodingRow(tuple(ids[b, :length].tolist()), task=tasks[b])
        for b, length in enumerate(lengths)
    ]
    return EncodingRequest(tuple(rows), ids.shape[1], attentions)


@dataclass(eq=False)
class RunningEncoding(QueuedRequest):
    """A request in progress; its rows finish one by one, in any order."""

    request: EncodingRequest
    future: Future[EncodingResult]
    arrival: int = 0
    waiting: list[int] = field(default_factory=list)  # rows that have not begun
    hidden: dict[int, Tensor] = field(default_factory=dict)  # row -> (tokens, E)
    attentions: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = list(range(len(self.request.rows)))

    @property
    def has_begun(self) -> bool:
        """Whether a step took some of its rows."""
        return len(self.waiting) < len(self.request.rows)

    def result(self) -> EncodingResult:
        """Return the answer, once all rows are done."""
        rows, width = len(self.request.rows), self.request.width
        # Joined on the device, so that one copy brings all rows to the host.
        padded = self.hidden[0].new_zeros(rows, width, self.hidden[0].shape[1], dtype=torch.float32)
        for row, values in self.hidden.items():
            padded[row, : len(values)] = values
        hidden = _host_buffer(padded.shape, pinned=padded.is_cuda).copy_(padded)
        if not self.request.attentions:
            return EncodingResult(hidden)
        layers, heads = self.attentions[0].shape[:2]
        attentions = torch.zeros(rows, layers, heads, width, width)
        for row, values in self.attentions.items():
            size = values.shape[2]
            attentions[row, :, :, :size, :size] = values
        return EncodingResult(hidden, attentions)


@dataclass(frozen=True)
class PlannedEncoding(PlannedStep):
    """A step, and its rows as pairs of a request and the row's index."""

    work: Sequence[tuple[RunningEncoding, int]]


class EncodingScheduler(StepScheduler):
    """The rows of all requests, in order of arrival."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu

    def plan(self, *, under_way: bool = False) -> PlannedEncoding | None:
        """Return the next step, or None if there is nothing to compute; steps never overlap."""
        assert not under_way
        for request in [r for r in self.requests if r.future.cancelled()]:
            self.drop(request)
        if not self.requests:
            return None
        attentions = next(iter(self.requests)).request.attentions
        work = self._take(attentions=attentions)
        # Adjacent rows of equal length share an attention call.
        work.sort(key=lambda each: each[0].request.rows[each[1]].length)
        rows = [owner.request.rows[index] for owner, index in work]
        states = [row.states for row in rows if row.states is not None]
        plan = StepPlan(
            ids=[],
            segments=(),
            output_rows=[],
            embedding_rows=sum(map(len, states)),
            encoder_rows=tuple(EncoderRow(row.length, task=row.task) for row in rows),
            encoder_ids=[token for row in rows for token in row.ids],
            attentions=attentions,
        )
        joined = None
        if states:
            joined = _host_buffer((plan.embedding_rows, states[0].shape[1]), pinned=self._on_gpu)
            np.concatenate(states, out=joined.numpy())
        owners = list(dict.fromkeys(owner for owner, _ in work))
        return PlannedEncoding(plan, joined, overlaps=False, owners=owners, work=work)

    def _take(self, *, attentions: bool) -> list[tuple[RunningEncoding, int]]:
        """Take rows until a step is full, at least one."""
        work: list[tuple[RunningEncoding, int]] = []
        budget = _GPU_STEP_TOKENS if self._on_gpu else _STEP_TOKENS
        for request in self.requests:
            if request.request.attentions != attentions:
                continue
            while request.waiting:
                length = request.request.rows[request.waiting[0]].length
                if work and length > budget:
                    return work
                work.append((request, request.waiting.pop(0)))
                budget -= length
        return work

    def finish(self, step: PlannedEncoding, result: StepResult, *, seconds: float) -> None:  # noqa: ARG002
        """Store the results of a step, and answer the requests whose rows are all done."""
        assert result.hidden is not None
        first = 0
        for number, (owner, index) in enumerate(step.work):
            length = owner.request.rows[index].length
            owner.hidden[index] = result.hidden[first : first + length]
            if result.attentions is not None:
                weights = result.attentions[number, :, :, :length, :length]
                owner.attentions[index] = weights.float().cpu()
            first += length
        for owner in step.owners:
            if len(owner.hidden) == len(owner.request.rows):
                self.drop(owner)
                owner.succeed(owner.result())


def _host_buffer(shape: Sequence[int], *, pinned: bool) -> Tensor:
    """Return an uninitialised fp32 tensor in host memory.

    The GPU copies `pinned` memory itself, and torch reuses it without new page faults: BERT-base on
    an H200 answers 32 rows of 384 tokens in 12.6 ms with it, in 35 ms without.
    """
    return torch.empty(tuple(shape), pin_memory=pinned)
