"""The plan of a step, which rank 0 sends to every rank as one integer tensor."""

# Layout of a packed plan, int32: command, length, counts and flags, then per segment
# (slot, start, count, forgotten), per move (source, target, start, stop), per table entry (slot,
# place, block), output rows, choices, the bits of draws and of penalties, per marked slot (slot,
# count, ids), token ids, and for encoders the ids of their rows and per row (count, task or -1,
# slot count, slots).

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inference.model.kv_cache import Array, Move, TableEntry
from inference.model.step import Segment

_HEADER = 13
_DRAW = 6  # numbers of a draw
_PENALTY = 2  # numbers of a penalty

# Bits of a plan's flags.
_HAS_VIRTUAL, _POOL, _ATTENTIONS, _CHOICES, _DRAWS, _LOGITS, _PENALTIES = (1 << n for n in range(7))


class Command(enum.IntEnum):
    """The kind of a plan."""

    STEP = 1
    PING = 2  # answer: rank 0 checks that every rank is alive
    STOP = 3


@dataclass(frozen=True)
class EncoderRow:
    """One row of an encoder pass.

    Attributes:
        count: Its tokens.
        slots: Slots of the decoder that read its output; none for an encoder alone.
        task: IA3 task, None without IA3.
    """

    count: int
    slots: tuple[int, ...] = ()
    task: int | None = None


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
        draws: For every output row the six numbers of `Draw` in `inference.decoding.sampling`.
            None if every choice is the best token.
        penalties: For every output row the two numbers of `Penalty` there. None if no row has
            marks; otherwise there are draws.
        marks: Slots whose marks are set before the choice, and the ids: an id that the row has
            seen, ~id for one that it may not choose. Ranks mark what they choose themselves.
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
    marks: Sequence[tuple[int, Array]] = ()
    with_logits: bool = False
    has_virtual: bool = False
    embedding_rows: int = 0
    pool: bool = False
    encoder_rows: tuple[EncoderRow, ...] = ()
    encoder_ids: Sequence[int] = ()
    attentions: bool = False
    encoder_layers: int = 0


@dataclass(frozen=True)
class ReceivedPlan:
    """A plan as a rank reads it, with ids and output rows as tensors."""

    ids: torch.Tensor  # (N,) int64
    segments: tuple[Segment, ...]
    output_rows: torch.Tensor  # (n,) int64
    moves: tuple[Move, ...]
    entries: tuple[TableEntry, ...]
    choices: Array | None  # (2, n)
    draws: Array | None  # (n, 6) fp32
    penalties: Array | None  # (n, 2) fp32
    marks: tuple[tuple[int, Array], ...]
    with_logits: bool
    has_virtual: bool
    embedding_rows: int
    pool: bool
    encoder_rows: tuple[EncoderRow, ...]
    encoder_ids: torch.Tensor  # (E,) int64
    attentions: bool
    encoder_layers: int


def received(plan: StepPlan) -> ReceivedPlan:
    """Return the plan as a rank reads it, without packing, for a single rank."""
    return ReceivedPlan(
        ids=torch.tensor(plan.ids, dtype=torch.int64),
        segments=plan.segments,
        output_rows=torch.tensor(plan.output_rows, dtype=torch.int64),
        moves=plan.moves,
        entries=tuple(plan.entries),
        choices=None if plan.choices is None else np.array(plan.choices, np.int64).reshape(-1, 2).T,
        draws=None if plan.draws is None else np.array(plan.draws, np.float32),
        penalties=None if plan.penalties is None else np.array(plan.penalties, np.float32),
        marks=tuple(plan.marks),
        with_logits=plan.with_logits,
        has_virtual=plan.has_virtual,
        embedding_rows=plan.embedding_rows,
        pool=plan.pool,
        encoder_rows=plan.encoder_rows,
        encoder_ids=torch.tensor(plan.encoder_ids, dtype=torch.int64),
        attentions=plan.attentions,
        encoder_layers=plan.encoder_layers,
    )


def pack_command(command: Command) -> torch.Tensor:
    """Return a plan that is only a command."""
    return torch.tensor([command, _HEADER] + [0] * (_HEADER - 2), dtype=torch.int32)


def pack_plan(plan: StepPlan) -> torch.Tensor:
    """Return the plan as one int32 tensor."""
    flags = _HAS_VIRTUAL * plan.has_virtual + _POOL * plan.pool + _ATTENTIONS * plan.attentions
    flags += _CHOICES * (plan.choices is not None) + _DRAWS * (plan.draws is not None)
    flags += _LOGITS * plan.with_logits + _PENALTIES * (plan.penalties is not None)
    values = [Command.STEP, 0, len(plan.segments), len(plan.moves), len(plan.output_rows)]
    values += [len(plan.ids), flags, plan.embedding_rows]
    values += [len(plan.encoder_rows), len(plan.encoder_ids), plan.encoder_layers]
    values += [len(plan.entries), sum(2 + len(ids) for _, ids in plan.marks)]
    for segment in plan.segments:
        values += (segment.slot, segment.start, segment.count, segment.forgotten)
    for move in plan.moves:
        values += move
    for entry in plan.entries:
        values += entry
    values += plan.output_rows
    for choice in plan.choices or ():
        values += choice
    for numbers in (plan.draws, plan.penalties):
        if numbers is not None:
            values += np.array(numbers, np.float32).view(np.int32).ravel().tolist()
    for slot, ids in plan.marks:
        values += (slot, len(ids), *ids.tolist())
    values += plan.ids
    values += plan.encoder_ids
    for row in plan.encoder_rows:
        values += (row.count, -1 if row.task is None else row.task, len(row.slots), *row.slots)
    values[1] = len(values)
    return torch.tensor(values, dtype=torch.int32)


def command_of(packed: torch.Tensor) -> Command:
    """Return the kind of a packed plan."""
    return Command(int(packed[0]))


def unpack_plan(packed: torch.Tensor) -> ReceivedPlan:
    """Return the step in a packed plan."""
    header = packed[:_HEADER].tolist()
    segments, moves, outputs, ids, flags, embedding_rows = header[2:8]
    encoder_rows, encoder_ids, encoder_layers, entries, marks = header[8:]
    moves_at = _HEADER + 4 * segments
    entries_at = moves_at + 4 * moves
    outputs_at = entries_at + 3 * entries
    choices_at = outputs_at + outputs
    draws_at = choices_at + (2 * outputs if flags & _CHOICES else 0)
    penalties_at = draws_at + (_DRAW * outputs if flags & _DRAWS else 0)
    marks_at = penalties_at + (_PENALTY * outputs if flags & _PENALTIES else 0)
    choices, draws = packed[choices_at:draws_at], packed[draws_at:penalties_at]
    ids_at = marks_at + marks
    encoder_at = ids_at + ids
    rows_at = encoder_at + encoder_ids
    return ReceivedPlan(
        ids=packed[ids_at : ids_at + ids].long(),
        segments=tuple(Segment(*each) for each in _tuples(packed[_HEADER:moves_at], 4)),
        output_rows=packed[outputs_at:choices_at].long(),
        moves=tuple(_tuples(packed[moves_at:entries_at], 4)),
        entries=tuple(_tuples(packed[entries_at:outputs_at], 3)),
        choices=choices.long().view(-1, 2).T.numpy() if flags & _CHOICES else None,
        draws=_numbers(draws, _DRAW) if flags & _DRAWS else None,
        penalties=(
            _numbers(packed[penalties_at:marks_at], _PENALTY) if flags & _PENALTIES else None
        ),
        marks=tuple(_marks(packed[marks_at:ids_at].numpy())),
        with_logits=bool(flags & _LOGITS),
        has_virtual=bool(flags & _HAS_VIRTUAL),
        embedding_rows=embedding_rows,
        pool=bool(flags & _POOL),
        encoder_rows=_encoder_rows(packed[rows_at:].tolist(), encoder_rows),
        encoder_ids=packed[encoder_at:rows_at].long(),
        attentions=bool(flags & _ATTENTIONS),
        encoder_layers=encoder_layers,
    )


def _tuples(values: torch.Tensor, size: int) -> Iterator[Any]:
    return map(tuple, values.view(-1, size).tolist())


def _numbers(values: torch.Tensor, size: int) -> Array:
    return values.numpy().view(np.float32).reshape(-1, size)


def _marks(values: Array) -> Iterator[tuple[int, Array]]:
    while len(values):
        slot, count = values[:2].tolist()
        yield slot, values[2 : 2 + count].astype(np.int64)
        values = values[2 + count :]


def _encoder_rows(values: list[int], count: int) -> tuple[EncoderRow, ...]:
    rows, at = [], 0
    for _ in range(count):
        tokens, task, slot_count = values[at : at + 3]
        slots = tuple(values[at + 3 : at + 3 + slot_count])
        rows.append(EncoderRow(tokens, slots, None if task < 0 else task))
        at += 3 + slot_count
    return tuple(rows)
