"""Requests in the engine: their sequences, the sequences' cache tables, and sessions."""

# Shapes: n prompt tokens of a chunk, V vocabulary, E hidden

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from inference.decoding.processors import token_scores
from inference.decoding.rows import (
    P_TUNING,
    PREFIX_PROMPT,
    SOFT_PROMPT,
    GenerationRequest,
    PromptResult,
    PromptTable,
    SequenceRequest,
    SequenceResult,
    SessionTurn,
    TokenScore,
)
from inference.decoding.sampler import Answer
from inference.decoding.sampling import SampledAnswer
from inference.decoding.sampling_params import SamplingParams
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import TokenIds
from inference.engine.load import RequestTimes
from inference.engine.queued_request import QueuedRequest
from inference.model.token_feed import NEWEST


@dataclass(frozen=True)
class GenerationStep:
    """The results so far of a request's sequences, None before a sequence's first token.

    In a session the prompts of `request` hold the whole conversation.
    """

    request: GenerationRequest
    rows: tuple[SequenceResult | None, ...]


@dataclass(frozen=True)
class GenerationResult(GenerationStep):
    """The results of a finished request."""

    rows: tuple[SequenceResult, ...]
    times: RequestTimes | None = None


# Called with a GenerationStep, or with the new tokens of each sequence. If it returns True, nothing
# more is needed, and the request ends once no sequence waits.
OnStep = Callable[[Any], bool | None]


@dataclass(eq=False)
class Session:
    """One conversation; `idle` holds its sequences that are ready for the next turn."""

    turn: SessionTurn  # the newest
    start: GenerationRequest  # its sizes hold for all turns
    idle: dict[int, RunningSequence] = field(default_factory=dict)
    is_busy: bool = True
    holds_slots: bool = False
    blocks: int = 0  # reserved for its slots
    used_s: float = 0.0  # when its last turn ended

    @property
    def session_len(self) -> int:
        """Most tokens of the whole conversation."""
        assert self.start.session_len is not None, "checked when it was submitted"
        return self.start.session_len


class PromptOutputs:
    """Outputs that are collected while a prompt is computed, chunk by chunk.

    Attributes:
        wants_logits: Whether the logits of the next chunk's tokens are needed.
        wants_pooled: Whether the sum of its hidden states is needed.
    """

    def __init__(self, options: SamplingParams) -> None:
        self._is_summed = options.return_log_probs and options.return_context_cum_log_probs
        self._top = options.num_prompt_log_probs
        self.wants_logits = self._is_summed or self._top > 0
        self.wants_pooled = options.return_context_embeddings
        self._scores: list[TokenScore] = []
        self._pooled: Tensor | None = None

    def add_logits(self, logits: Tensor, next_ids: Sequence[int], *, vocab_size: int) -> None:
        """Add the next chunk's logits (n, V), given the prompt token that follows each position."""
        logits = logits[: len(next_ids)]  # no prompt token follows the last one
        if next_ids:
            self._scores += token_scores(logits, next_ids, top=self._top, vocab_size=vocab_size)

    def add_pooled(self, pooled: Tensor) -> None:
        """Add the sum (E,) of the next chunk's hidden states."""
        self._pooled = pooled if self._pooled is None else self._pooled + pooled

    def restart(self) -> None:
        """Drop the outputs of an unfinished prompt, which will be computed again."""
        if self.wants_logits or self.wants_pooled:
            self._scores, self._pooled = [], None

    def finish(self) -> PromptResult:
        """Return the outputs of the whole prompt; nothing more is collected."""
        self.wants_logits = self.wants_pooled = False
        total = math.fsum(score.log_prob for score in self._scores) if self._is_summed else 0.0
        pooled = None if self._pooled is None else self._pooled.cpu().numpy()
        return PromptResult(total, tuple(self._scores) if self._top else (), pooled)


class SequenceStatus(enum.Enum):
    """The state of a sequence; docs/engine.md draws the transitions."""

    WAITING = "waiting"  # for its first slot
    ENCODE = "encode"  # has slots; the encoder reads its input
    PREFILL = "prefill"  # its prompt is being computed
    DECODE = "decode"  # each step computes its newest token
    PREEMPTED = "preempted"  # waits again; its generated tokens have become part of its prompt
    FINISHED = "finished"
    ABORTED = "aborted"  # its client left, or a step failed


_FOLLOWING = {
    "WAITING": "ENCODE PREFILL ABORTED",
    "PREEMPTED": "ENCODE PREFILL ABORTED",
    "ENCODE": "PREFILL PREEMPTED ABORTED",
    "PREFILL": "DECODE FINISHED PREEMPTED ABORTED",
    "DECODE": "FINISHED PREEMPTED ABORTED",
    "FINISHED": "",
    "ABORTED": "",
}
TRANSITIONS = {
    SequenceStatus[name]: {SequenceStatus[each] for each in following.split()}
    for name, following in _FOLLOWING.items()
}


@dataclass
class BlockTable:
    """The tokens of a sequence in the cache, and the slots that hold them, one for each beam.

    Attributes:
        cached: Tokens that have been written to the cache.
        forgotten: How many of the first tokens were dropped from it again.
        memory_len: Most tokens that a slot keeps, None for all.
        shift: Added to the positions, see `rotary.position_shift`.
        capacity: Tokens that fit into the blocks of its slot.
        prefix_hashes: Hashes of the prompt up to the end of each block that can be shared.
        registered: How many of these blocks other sequences can share by now.
    """

    slots: list[int] = field(default_factory=list)
    cached: int = 0
    forgotten: int = 0
    memory_len: int | None = None
    shift: int = 0
    capacity: float = math.inf
    prefix_hashes: list[bytes] = field(default_factory=list)
    registered: int = 0

    @property
    def held(self) -> int:
        """Tokens that a slot holds now."""
        return self.cached - self.forgotten


@dataclass(eq=False)
class RunningSequence:
    """One sequence of a request in the engine.

    `prompt` is the input of the first stage: token ids; from the vocabulary's end on, ids of loaded
    virtual tokens; and -1 - i for row i of the embeddings sent with the request. Placeholders for
    the loaded prefix of `prefix_task` come first. The scheduler sets `answer`.
    """

    owner: RunningRequest
    index: int
    request: SequenceRequest
    prompt: list[int]
    uses_prompt_table: bool = False  # `prompt` has ids of a loaded table of virtual tokens
    embeddings: Array | None = None  # (rows, hidden) fp32
    encoder_ids: list[int] | None = None  # encoder-decoder only; `prompt` is then the start id
    prefix_task: int | None = None
    prefix_len: int = 0  # tokens of the loaded prefix, in the cache before the first step
    prompt_tokens: int = 0  # length of `prompt` before a preemption added generated tokens
    status: SequenceStatus = SequenceStatus.WAITING
    table: BlockTable = field(default_factory=BlockTable)
    answer: Answer = field(init=False)
    next_ids: TokenIds = ()  # to decode, one per slot; NEWEST for a token that only the ranks know
    produced: int = 0  # tokens chosen, those of steps under way included
    needs_marks: bool = True  # whether ranks must mark ids for its slot before they choose

    def __post_init__(self) -> None:
        self.prompt_outputs = PromptOutputs(self.request.options)

    def become(self, status: SequenceStatus) -> None:
        """Change the status."""
        assert status in TRANSITIONS[self.status], f"{self.status} cannot become {status}"
        self.status = status

    @property
    def is_over(self) -> bool:
        """Whether it has ended; results of steps under way are then ignored."""
        return self.status in (SequenceStatus.FINISHED, SequenceStatus.ABORTED)

    @property
    def slots(self) -> list[int]:
        """Its slots, one for each beam; none while it waits."""
        return self.table.slots

    @property
    def prompt_len(self) -> int:
        """Cache entries of the prompt."""
        return len(self.prompt)

    @property
    def encoder_len(self) -> int:
        """Tokens that the encoder reads."""
        return len(self.encoder_ids or ())

    @property
    def needs_step(self) -> bool:
        """Whether it decodes and needs tokens beyond those of steps under way."""
        if self.status is not SequenceStatus.DECODE:
            return False
        return self.next_ids[0] != NEWEST or self.produced < self.request.output_len

    @property
    def can_share(self) -> bool:
        """Whether its prompt consists of plain tokens, none of whose outputs is wanted."""
        if self.prompt_outputs.wants_logits or self.prompt_outputs.wants_pooled:
            return False
        # Not compared by ==, as embeddings are an array.
        return all(each is None for each in (self.embeddings, self.prefix_task, self.encoder_ids))

    def begin(self) -> None:
        """Leave the queue: the sequence has slots."""
        self.become(SequenceStatus.PREFILL if self.encoder_ids is None else SequenceStatus.ENCODE)

    def decode(self, next_ids: TokenIds) -> None:
        """Let the next step compute the newest token of each slot."""
        self.next_ids = next_ids
        if self.status is SequenceStatus.PREFILL:
            self.become(SequenceStatus.DECODE)

    def preempt(self) -> None:
        """Return to the queue with the generated tokens as part of the prompt."""
        self.become(SequenceStatus.PREEMPTED)
        assert isinstance(self.answer, SampledAnswer), "a beam search keeps its blocks"
        self.prompt = self.prompt[: self.prompt_tokens] + self.answer.generated_from(0)
        self.table = BlockTable(cached=self.prefix_len)
        self.needs_marks = True
        self.prompt_outputs.restart()


@dataclass(eq=False)
class RunningRequest(QueuedRequest):
    """One client request.

    With `lock_step`, sequences start decoding together, so that streamed frames line up. `turn` is
    set for requests of a session, `session` once the turn has begun. `on_step` receives a
    `GenerationStep`, or with `only_tokens` the `new_tokens`.
    """

    request: GenerationRequest
    future: Future[Any]
    arrival: int = 0
    on_step: OnStep | None = None
    only_tokens: bool = False
    lock_step: bool = False
    turn: SessionTurn | None = None
    session: Session | None = None
    waiting: list[RunningSequence] = field(default_factory=list)
    active: list[RunningSequence] = field(default_factory=list)
    times: RequestTimes = field(default_factory=RequestTimes)

    def __post_init__(self) -> None:
        self.results: list[SequenceResult | None] = [None] * len(self.request.rows)
        self._reported = [0] * len(self.request.rows)  # number of tokens, by sequence

    @property
    def is_running(self) -> bool:
        """Whether a sequence has not ended."""
        return bool(self.active or self.waiting)

    @property
    def has_begun(self) -> bool:
        """Whether a sequence holds a part of the cache."""
        return bool(self.active)

    def progress(self) -> GenerationStep:
        """Return the results so far."""
        results = list(self.results)
        for sequence in [*self.active, *self.waiting]:
            if sequence.answer.tokens:
                results[sequence.index] = sequence.answer.result()
        return GenerationStep(self.request, tuple(results))

    def new_tokens(self) -> list[Sequence[int]]:
        """Return each sequence's tokens since the last call, in time proportional to their number.

        Not for beam searches, which may replace tokens.
        """
        ended = zip(self.results, self._reported, strict=True)
        new: list[Sequence[int]] = [row.output_ids[0][n:] if row else () for row, n in ended]
        for sequence in [*self.active, *self.waiting]:
            assert isinstance(sequence.answer, SampledAnswer)
            new[sequence.index] = sequence.answer.generated_from(self._reported[sequence.index])
        self._reported = [n + len(ids) for n, ids in zip(self._reported, new, strict=True)]
        return new

    @property
    def is_pinned(self) -> bool:
        """Whether it is never preempted: sessions and beam searches keep their blocks."""
        return self.turn is not None or self.request.beam_width > 1

    @property
    def starts_together(self) -> bool:
        """Whether all its sequences must get slots at the same time."""
        return self.lock_step or self.turn is not None


def make_sequence(
    owner: RunningRequest,
    index: int,
    request: SequenceRequest,
    *,
    vocab_size: int,
    table_rows: dict[int, int],
) -> RunningSequence:
    """Return a sequence of a request, with its input of the first stage.

    `table_rows` maps a task id to its first row in the concatenated loaded prompt tables.
    """
    ids, prompt = list(request.input_ids), request.prompt
    sequence = RunningSequence(owner, index, request, ids)
    if prompt is not None and prompt.kind == PREFIX_PROMPT:
        sequence.prompt = [0] * prompt.length + ids
        sequence.prefix_task = prompt.task_id
        sequence.table.cached = sequence.prefix_len = prompt.length
    elif prompt is not None:
        if prompt.kind == SOFT_PROMPT:
            sequence.prompt = [-1 - i for i in range(prompt.length)] + ids
        else:
            assert prompt.kind == P_TUNING, f"prompt of type {prompt.kind}"
            sequence.prompt = [_virtual(i, prompt, vocab_size, table_rows) for i in ids]
        sequence.uses_prompt_table = any(i >= vocab_size for i in sequence.prompt)
        sequence.embeddings = prompt.embedding
    if owner.request.encoder_decoder:
        sequence.encoder_ids = sequence.prompt
        sequence.prompt = list(request.context_ids)
    sequence.prompt_tokens = len(sequence.prompt)
    return sequence


def _virtual(token: int, prompt: PromptTable, vocab_size: int, table_rows: dict[int, int]) -> int:
    place = token - prompt.start_id
    if not 0 <= place < prompt.length:
        return token
    if prompt.embedding is not None:
        return -1 - place
    assert prompt.task_id is not None
    return vocab_size + table_rows[prompt.task_id] + place
