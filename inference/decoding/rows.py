"""Checked requests by sequence, the limits of a model, and the results of sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inference.decoding.grammars import Constraint, Grammars
from inference.decoding.sampling_params import SamplingParams
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import TokenIds, Words

# Values of prompt_learning_type and request_prompt_type.
NO_PROMPT, SOFT_PROMPT, PREFIX_PROMPT, P_TUNING = 0, 1, 2, 3

FinishReason = Literal["end", "stop", "length"]


class RequestError(ValueError):
    """An invalid request; `problems` holds every reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, eq=False)
class PromptTable:
    """The virtual prompt of one row.

    `kind` is SOFT_PROMPT (prepended embeddings), PREFIX_PROMPT (loaded keys and values) or P_TUNING
    (ids from `start_id` on are looked up in the table). Exactly one of `task_id` (a table loaded
    with the model) and `embedding` (length, hidden) fp32 is set.
    """

    kind: int
    length: int
    start_id: int
    task_id: int | None = None
    embedding: Array | None = None

    @property
    def cached_len(self) -> int:
        """Cache entries before those of the ids; none with P_TUNING, which replaces ids."""
        return 0 if self.kind == P_TUNING else self.length


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a request, read from the model's `config.ini`, and the model's end tokens.

    `vocab_size` excludes padding. `max_pos_seq_len` is None for models without a position table.
    `prompt_lengths` maps the id of each loaded prompt task to its number of virtual tokens.
    `prompt_learning_start_id` None means the first id after `end_id` (T5: after the encoder's
    vocabulary). Without `grammars`, requests cannot ask for structured output.
    """

    vocab_size: int
    start_id: int
    end_id: int
    other_end_ids: TokenIds = ()
    max_pos_seq_len: int | None = None
    encoder_decoder: bool = False
    hidden_units: int = 0
    prompt_learning_type: int = 0
    prompt_learning_start_id: int | None = None
    prompt_lengths: Mapping[int, int] = field(default_factory=dict)
    ia3_num_tasks: int = 0
    grammars: Grammars | None = field(default=None, compare=False)

    @property
    def end_ids(self) -> TokenIds:
        """The tokens that end an answer; the first is the one of `config.ini`."""
        return (self.end_id, *self.other_end_ids)

    @property
    def virtual_start_id(self) -> int:
        """The id of the first virtual token."""
        if self.prompt_learning_start_id is not None:
            return self.prompt_learning_start_id
        return self.vocab_size + 1 if self.encoder_decoder else self.end_id + 1


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence of a request.

    `input_ids` is the model's input: without padding; the start id for an empty prompt.
    `returned_ids` is the part of the prompt that `output_ids` repeats: no virtual tokens, empty for
    an empty prompt. `context_ids` is the beginning of the sequence for penalties and word lists:
    the prompt, or the start id for an encoder-decoder model.
    """

    input_ids: TokenIds
    output_len: int
    options: SamplingParams
    context_ids: TokenIds = ()
    returned_ids: TokenIds = ()
    prompt: PromptTable | None = None
    ia3_task: int | None = None
    constraint: Constraint | None = field(default=None, compare=False)

    @property
    def context_len(self) -> int:
        """Cache entries before the first generated token: virtual tokens and context."""
        return (self.prompt.cached_len if self.prompt else 0) + len(self.context_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """All rows of one client request; `padded_len` is S of its `input_ids`."""

    rows: tuple[SequenceRequest, ...]
    padded_len: int
    encoder_decoder: bool = False
    session_len: int | None = None
    memory_len: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def beam_width(self) -> int:
        """K, the same for all rows."""
        return self.rows[0].options.beam_width

    def slot_tokens(self, row: SequenceRequest) -> int:
        """Return the most tokens that a slot of a row ever holds; the last is never fed back."""
        if self.session_len is None:
            return row.context_len + row.output_len - 1
        return min(self.session_len, self.memory_len or self.session_len)

    @property
    def max_output_len(self) -> int:
        """The most tokens that any row asks for."""
        return max(row.output_len for row in self.rows)


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session, possibly its first or last; `session_id` is neither 0 nor empty."""

    session_id: int | str
    starts: bool = False
    ends: bool = False


@dataclass(frozen=True)
class TokenScore:
    """The log probability of one token under the model, and the best tokens at its position.

    Natural logarithms of the softmax over the unprocessed logits; `top_ids` are in descending order
    of `top_log_probs`.
    """

    log_prob: float
    top_ids: TokenIds
    top_log_probs: tuple[float, ...]


@dataclass(frozen=True)
class PromptResult:
    """The summed log probability of a prompt's tokens, and `scores` of its tokens but the first.

    `embedding` is the sum of its hidden states, (hidden,) fp32. Each is empty unless requested.
    """

    log_prob: float = 0.0
    scores: tuple[TokenScore, ...] = ()
    embedding: Array | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SequenceResult:
    """The K hypotheses of one sequence, best first: generated tokens, the end token included.

    `output_log_probs` and `scores`, by generated token, are empty unless requested. `cum_log_probs`
    include the prompt's sum. A finish reason of None marks a hypothesis that still runs.
    """

    output_ids: Words
    cum_log_probs: tuple[float, ...]
    output_log_probs: tuple[tuple[float, ...], ...]
    finish_reasons: tuple[FinishReason | None, ...]
    scores: tuple[TokenScore, ...] = ()
    prompt: PromptResult = PromptResult()
