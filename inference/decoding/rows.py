"""What a model allows, and what a client asks for once it is checked and normalised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.decoding.options import RowOptions
from inference.decoding.prompts import P_TUNING, SOFT_PROMPT, PromptTable


class RequestError(ValueError):
    """A request that cannot be served; `problems` holds every reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class ModelLimits:
    """What a request must respect, all read from the model's `config.ini`.

    `vocab_size` is the real vocabulary, without padding. `max_pos_seq_len` is None for models
    without a position table. `prompt_lengths` maps the id of each loaded prompt task to its
    number of virtual tokens. `prompt_learning_start_id` None means the first id after `end_id`
    (T5: after the encoder's vocabulary).
    """

    vocab_size: int
    start_id: int
    end_id: int
    max_pos_seq_len: int | None = None
    encoder_decoder: bool = False
    hidden_units: int = 0
    prompt_learning_type: int = 0
    prompt_learning_start_id: int | None = None
    prompt_lengths: Mapping[int, int] = field(default_factory=dict)
    request_prompt_types: frozenset[int] = frozenset({SOFT_PROMPT, P_TUNING})
    ia3_num_tasks: int = 0
    context_outputs: bool = True

    @property
    def virtual_start_id(self) -> int:
        """The id of the first virtual token."""
        if self.prompt_learning_start_id is not None:
            return self.prompt_learning_start_id
        return self.vocab_size + 1 if self.encoder_decoder else self.end_id + 1


@dataclass(frozen=True)
class RowRequest:
    """One row. `input_ids` is what the model reads: no padding, the start id if it was empty.

    `returned_ids` is the part of the prompt that `output_ids` repeats (no virtual tokens, empty
    for an empty prompt). `context_ids` starts the running sequence that penalties and word lists
    see: the prompt, or the start id alone for an encoder-decoder model.
    """

    input_ids: tuple[int, ...]
    output_len: int
    options: RowOptions
    context_ids: tuple[int, ...] = ()
    returned_ids: tuple[int, ...] = ()
    prompt: PromptTable | None = None
    ia3_task: int | None = None

    @property
    def context_len(self) -> int:
        """Cache entries before the first generated token: virtual ones and context."""
        return (self.prompt.cached_len if self.prompt else 0) + len(self.context_ids)


@dataclass(frozen=True)
class GenerationRequest:
    """All rows of one client request; `padded_len` is S of its `input_ids`."""

    rows: tuple[RowRequest, ...]
    padded_len: int
    encoder_decoder: bool = False
    session_len: int | None = None
    memory_len: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def beam_width(self) -> int:
        """K, the same for all rows."""
        return self.rows[0].options.beam_width

    @property
    def max_output_len(self) -> int:
        """Rmax, the largest number of tokens any row asks for."""
        return max(row.output_len for row in self.rows)
