"""What rank 0 tells every rank to do next, packed into one integer tensor."""

# Layout of a packed plan, int32: command, length, counts and flags, then per segment
# (lane, start, count, forgotten), per move (source, target, start, stop), output rows, token ids,
# and for encoders the ids of their rows and per row (count, task or -1, lane count, lanes).

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inference.model.step import Segment

_HEADER = 11

# A move copies cached tokens, see `KVCache.copy`: (source lane, target lane, first token, end).
Move = tuple[int, int, int, int]


class Command(enum.IntEnum):
    """What a plan asks for."""

    STEP = 1
    PING = 2  # answer, so that rank 0 knows that every rank lives
    STOP = 3


@dataclass(frozen=True)
class EncoderRow:
    """One row of an encoder pass.

    Attributes:
        count: Its tokens.
        lanes: Where the decoder finds what it reads of the row; none for an encoder alone.
        task: IA3 task, None without IA3.
    """

    count: int
    lanes: tuple[int, ...] = ()
    task: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """One step: encoder pass and cache moves first, then a pass over the segments' tokens.

    Attributes:
        ids: Token ids of all segments, one after the other.
        segments: Sequences with new tokens, by ascending lane.
        output_rows: Tokens whose logits are wanted, ascending.
        moves: Cache copies, all of them before the pass.
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
    has_virtual: bool = False
    embedding_rows: int = 0
    pool: bool = False
    encoder_rows: tuple[EncoderRow, ...] = ()
    encoder_ids: Sequence[int] = ()
    attentions: bool = False
    encoder_layers: int = 0


@dataclass(frozen=True)
class ReceivedPlan:
    """A plan as a rank reads it: what tensors are made of stays a tensor."""

    ids: torch.Tensor  # (N,) int64
    segments: tuple[Segment, ...]
    output_rows: torch.Tensor  # (n,) int64
    moves: tuple[Move, ...]
    has_virtual: bool
    embedding_rows: int
    pool: bool
    encoder_rows: tuple[EncoderRow, ...]
    encoder_ids: torch.Tensor  # (E,) int64
    attentions: bool
    encoder_layers: int


def received(plan: StepPlan) -> ReceivedPlan:
    """Return the plan as a rank reads it: what packing and unpacking gives, for a single rank."""
    return ReceivedPlan(
        ids=torch.tensor(plan.ids, dtype=torch.int64),
        segments=plan.segments,
        output_rows=torch.tensor(plan.output_rows, dtype=torch.int64),
        moves=plan.moves,
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


def pack(plan: StepPlan) -> torch.Tensor:
    """Return the plan as one int32 tensor."""
    flags = int(plan.has_virtual) + 2 * int(plan.pool) + 4 * int(plan.attentions)
    values = [Command.STEP, 0, len(plan.segments), len(plan.moves), len(plan.output_rows)]
    values += [len(plan.ids), flags, plan.embedding_rows]
    values += [len(plan.encoder_rows), len(plan.encoder_ids), plan.encoder_layers]
    for segment in plan.segments:
        values += (segment.lane, segment.start, segment.count, segment.forgotten)
    for move in plan.moves:
        values += move
    values += plan.output_rows
    values += plan.ids
    values += plan.encoder_ids
    for row in plan.encoder_rows:
        values += (row.count, -1 if row.task is None else row.task, len(row.lanes), *row.lanes)
    values[1] = len(values)
    return torch.tensor(values, dtype=torch.int32)


def command_of(packed: torch.Tensor) -> Command:
    """Return what a packed plan asks for."""
    return Command(int(packed[0]))


def unpack(packed: torch.Tensor) -> ReceivedPlan:
    """Return the step in a packed plan."""
    header = packed[:_HEADER].tolist()
    segments, moves, outputs, ids, flags, embedding_rows = header[2:8]
    encoder_rows, encoder_ids, encoder_layers = header[8:]
    small = packed[_HEADER : _HEADER + 4 * (segments + moves)].tolist()
    moves_at = 4 * segments
    outputs_at = _HEADER + moves_at + 4 * moves
    ids_at = outputs_at + outputs
    encoder_at = ids_at + ids
    rows_at = encoder_at + encoder_ids
    return ReceivedPlan(
        ids=packed[ids_at : ids_at + ids].long(),
        segments=tuple(Segment(*small[i : i + 4]) for i in range(0, moves_at, 4)),
        output_rows=packed[outputs_at:ids_at].long(),
        moves=tuple(
            (small[i], small[i + 1], small[i + 2], small[i + 3])
            for i in range(moves_at, len(small), 4)
        ),
        has_virtual=bool(flags & 1),
        embedding_rows=embedding_rows,
        pool=bool(flags & 2),
        encoder_rows=_encoder_rows(packed[rows_at:].tolist(), encoder_rows),
        encoder_ids=packed[encoder_at:rows_at].long(),
        attentions=bool(flags & 4),
        encoder_layers=encoder_layers,
    )


def _encoder_rows(values: list[int], count: int) -> tuple[EncoderRow, ...]:
    rows, at = [], 0
    for _ in range(count):
        tokens, task, lane_count = values[at : at + 3]
        lanes = tuple(values[at + 3 : at + 3 + lane_count])
        rows.append(EncoderRow(tokens, lanes, None if task < 0 else task))
        at += 3 + lane_count
    return tuple(rows)
