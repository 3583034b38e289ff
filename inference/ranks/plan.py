"""The plan of a step, which rank 0 sends to every rank as JSON.

JSON holds nothing but values: the connections of ranks are not authenticated, and what arrives by
them must not be able to run code.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from inference.model.kv_cache import Array, Move, TableEntry
from inference.model.step import Segment


class Command(NamedTuple):
    """A message to the ranks that is not a step.

    On "ping" they answer: rank 0 checks that every rank is alive. On "exchange" the weights of
    `ft_dir` take the place of those that are loaded.
    """

    name: Literal["ping", "stop", "exchange"]
    ft_dir: str = ""


class EncoderRow(NamedTuple):
    """One row of an encoder pass."""

    tokens: int
    slots: Sequence[int] = ()  # of the decoder, that read its output; none for an encoder alone
    task: int | None = None  # of IA3


@dataclass(frozen=True)
class StepPlan:
    """One step: encoder pass and cache moves first, then a pass over the segments' tokens.

    Attributes:
        ids: Token ids of all segments, one after the other.
        segments: Sequences with new tokens, by ascending slot.
        output_rows: Tokens whose logits are wanted, ascending.
        moves: Cache copies, all of them before the pass.
        entries: Blocks that slots get before the pass.
        choices: For every output row the slot whose newest token is chosen from it, negative for
            none, and an id that may not be chosen, negative for none. None if the scheduler
            chooses, as it must for a pipeline.
        draws: For every output row the numbers of `DrawParameters` in `inference.decoding.draws`.
            None if every choice is the best token.
        penalties: For every output row the three numbers of `Penalty` there. None if no row has
            marks; otherwise there are draws.
        marks: Slots whose marks are set before the choice, and the arrays of `TokenMarks` there.
            Ranks mark what they choose themselves.
        with_logits: Whether the logits are wanted, even if some tokens are chosen from them.
        has_virtual: Whether some ids lie beyond the vocabulary.
        embedding_rows: Rows of embeddings that follow the plan, for ids beyond loaded tables.
        pool: Whether the sums of each segment's last hidden states are wanted.
        encoder_rows: Rows for the encoder of a model that has one.
        encoder_ids: Their token ids; none where the rows are embeddings.
        attentions: Whether the encoder's attention weights are wanted.
        encoder_layers: How many of the encoder's layers to run, on the rows of this step or on
            those that an earlier one began with; 0 for all.
    """

    ids: Sequence[int]
    segments: tuple[Segment, ...]
    output_rows: Sequence[int]
    moves: tuple[Move, ...] = ()
    entries: Sequence[TableEntry] = ()
    choices: Sequence[tuple[int, int]] | None = None
    draws: Sequence[Sequence[float]] | None = None
    penalties: Sequence[Sequence[float]] | None = None
    marks: Sequence[tuple[int, Sequence[Array]]] = ()
    with_logits: bool = False
    has_virtual: bool = False
    embedding_rows: int = 0
    pool: bool = False
    encoder_rows: tuple[EncoderRow, ...] = ()
    encoder_ids: Sequence[int] = ()
    attentions: bool = False
    encoder_layers: int = 0

    @property
    def is_decoding(self) -> bool:
        """Whether it has one token for each sequence, the logits of all of them wanted."""
        return 0 < len(self.output_rows) == len(self.segments) == len(self.ids)


_encode = json.JSONEncoder(
    separators=(",", ":"),
    check_circular=False,
    default=lambda values: np.asarray(values).tolist(),  # arrays and ranges
).encode


def pack_message(message: StepPlan | Command) -> bytes:
    """Return a message to the ranks as `unpack_message` reads it."""
    return _encode(message if isinstance(message, Command) else vars(message)).encode()


def unpack_message(packed: bytes) -> StepPlan | Command:
    """Return the message that `pack_message` wrote."""
    fields: Any = json.loads(packed)
    if isinstance(fields, list):
        return Command(*fields)
    fields["segments"] = tuple(Segment(*each) for each in fields["segments"])
    fields["moves"] = tuple(map(tuple, fields["moves"]))
    fields["encoder_rows"] = tuple(EncoderRow(*each) for each in fields["encoder_rows"])
    return StepPlan(**fields)
