"""The plan of a step, which rank 0 sends to every rank as JSON.

JSON carries values only: the connections of ranks are not authenticated, so that a message must not
be able to run code.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from inference.model.kv_cache import Array, Move, TableEntry
from inference.model.step import Segment


class Command(NamedTuple):
    """A message to the ranks that is not a step.

    "ping" checks that every rank answers; "exchange" replaces the loaded weights by those of
    `ft_dir`.
    """

    name: Literal["ping", "stop", "exchange"]
    ft_dir: str = ""


class EncoderRow(NamedTuple):
    """One row of an encoder pass."""

    tokens: int
    slots: Sequence[int] = ()  # decoder slots that read its output; empty for an encoder alone
    task: int | None = None  # of IA3


@dataclass(frozen=True)
class StepPlan:
    """One step: cache moves and encoder layers first, then a pass over the segments' tokens.

    Attributes:
        ids: Token ids of all segments, concatenated.
        segments: Sequences with new tokens, by ascending slot.
        output_rows: Indices of the tokens whose logits are wanted, ascending.
        moves: Cache copies to make before the pass.
        entries: Blocks that slots get before the pass.
        choices: For every output row, the slot whose newest token is chosen from it, and an id that
            must not be chosen; negative for none. None if the scheduler chooses all tokens, as it
            must for a pipeline.
        draws: For every output row, `DrawParameters` of `inference.decoding.draws`. None if every
            choice is the arg-max.
        penalties: For every output row, `Penalty` of the same module. None if no row has marks;
            requires draws.
        marks: Slots whose marks are set before the choice, with their `TokenMarks`. Ranks add the
            tokens that they choose.
        with_logits: Whether the logits are returned even if ranks choose tokens from them.
        has_virtual: Whether some ids lie beyond the vocabulary.
        embedding_rows: Number of embeddings sent after the plan, for ids beyond loaded tables.
        pool: Whether each segment's summed last hidden states are wanted.
        encoder_rows: New rows for the encoder of a model that has one.
        encoder_ids: Token ids of these rows; empty if they are embeddings.
        attentions: Whether the encoder's attention weights are wanted.
        encoder_layers: Number of encoder layers to run, on the new rows or on those of an
            unfinished pass; 0 for all.
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
        """Whether every sequence has one token, and all logits are wanted."""
        return 0 < len(self.output_rows) == len(self.segments) == len(self.ids)


_encode = json.JSONEncoder(
    separators=(",", ":"),
    check_circular=False,
    default=lambda values: np.asarray(values).tolist(),  # arrays and ranges
).encode


def pack_message(message: StepPlan | Command) -> bytes:
    """Return a message to the ranks, encoded for `unpack_message`."""
    return _encode(message if isinstance(message, Command) else vars(message)).encode()


def unpack_message(packed: bytes) -> StepPlan | Command:
    """Return the message that `pack_message` wrote."""
    fields = json.loads(packed)
    if isinstance(fields, list):
        return Command(*fields)
    fields["segments"] = tuple(Segment(*each) for each in fields["segments"])
    fields["moves"] = tuple(map(tuple, fields["moves"]))
    fields["encoder_rows"] = tuple(EncoderRow(*each) for each in fields["encoder_rows"])
    return StepPlan(**fields)
