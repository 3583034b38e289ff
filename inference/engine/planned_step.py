"""One step of the scheduler: the work of each row, laid out as the plan that ranks run."""

# Shapes: E hidden

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.decoding.draws import Draw, Marks, Penalty
from inference.decoding.tensor_fields import Array
from inference.engine.running import RunningRequest, RunningRow
from inference.model.kv_cache import Move, TableEntry
from inference.model.step import Segment
from inference.ranks.plan import EncoderRow, StepPlan


@dataclass(slots=True)
class RowWork:
    """The work of one row in a step, on one of its slots."""

    row: RunningRow
    slot: int
    ids: list[int]
    outputs: range  # of its tokens here, those whose logits are wanted
    samples: bool  # whether the last of them is for choosing a token
    first: int  # of its tokens, counted from the conversation's beginning
    is_prompt: bool


@dataclass(frozen=True)
class EncoderWork:
    """The rows that go through some of the encoder's layers in a step.

    `begins` marks the first step of their pass; `tokens` is the number of tokens whose whole pass
    would cost as much.
    """

    rows: tuple[RunningRow, ...] = ()
    layers: int = 0
    begins: bool = False
    tokens: int = 0


@dataclass(frozen=True)
class Choices:
    """The choices that ranks make, as in `StepPlan`."""

    slots: Sequence[tuple[int, int]] | None = None
    draws: Sequence[Draw] | None = None
    penalties: Sequence[Penalty] | None = None
    marks: Sequence[tuple[int, Marks]] = ()


@dataclass(frozen=True)
class PlannedStep:
    """A plan with its embeddings, and the rows it works for.

    With `overlaps` the next step may be planned before this one is finished.
    """

    plan: StepPlan
    embeddings: torch.Tensor | None  # (plan.embedding_rows, E) fp32
    work: tuple[RowWork, ...]
    prompt_tokens: int
    encoding: EncoderWork
    overlaps: bool

    @property
    def owners(self) -> list[RunningRequest]:
        """Requests with work in this step, each once."""
        rows = [*self.encoding.rows, *(work.row for work in self.work)]
        return list({id(row.owner): row.owner for row in rows}.values())


def lay_out(
    work: Sequence[RowWork],
    encoding: EncoderWork,
    *,
    moves: Sequence[Move],
    entries: Sequence[TableEntry],
    choices: Choices,
    with_logits: bool,
    embedding_base: int,
) -> PlannedStep:
    """Return the step that does this work.

    Args:
        work: By ascending slot.
        encoding: The encoder's work.
        moves: Cache copies to make before the pass.
        entries: Blocks that slots get before the pass.
        choices: Of the ranks.
        with_logits: See `StepPlan`.
        embedding_base: First id that names a row of embeddings sent with a step.
    """
    ids: list[int] = []
    outputs: list[int] = []
    sent: list[Array] = []
    segments: list[Segment] = []
    for each in work:
        row, count = each.row, len(each.ids)
        shift = row.forgotten + row.shift
        segments.append(Segment(each.slot, row.cached - row.forgotten, count, shift))
        if each.is_prompt:
            outputs += range(len(ids) + each.outputs.start, len(ids) + each.outputs.stop)
            ids += _with_sent(row, each.ids, sent, embedding_base)
        else:
            outputs.append(len(ids))
            ids += each.ids
    encoder_ids: list[int] = []
    begun = encoding.rows if encoding.begins else ()
    for row in begun:
        encoder_ids += _with_sent(row, row.encoder_ids or [], sent, embedding_base)
    prompts = [each for each in work if each.is_prompt]
    plan = StepPlan(
        ids=ids,
        segments=tuple(segments),
        output_rows=outputs,
        moves=tuple(moves),
        entries=entries,
        choices=choices.slots,
        draws=choices.draws,
        penalties=choices.penalties,
        marks=choices.marks,
        with_logits=with_logits or choices.slots is None,
        # A chunk need not hold any of the rows that its request sent.
        has_virtual=bool(sent)
        or any(row.has_table for row in (*begun, *(each.row for each in prompts))),
        embedding_rows=len(sent),
        pool=any(each.row.prompt_outputs.wants_pooled for each in prompts),
        encoder_rows=tuple(
            EncoderRow(row.encoder_len, tuple(row.slots), row.request.ia3_task) for row in begun
        ),
        encoder_ids=encoder_ids,
        encoder_layers=encoding.layers,
    )
    embeddings = torch.from_numpy(np.stack(sent)) if sent else None
    prompt_tokens = sum(len(each.ids) for each in prompts) + encoding.tokens
    # The next step depends on what the host reads.
    overlaps = not (plan.with_logits or plan.pool)
    return PlannedStep(plan, embeddings, tuple(work), prompt_tokens, encoding, overlaps)


def _with_sent(
    row: RunningRow, ids: list[int], sent: list[Array], embedding_base: int
) -> list[int]:
    """Return ids that name the embeddings sent with the step, which are added to `sent`."""
    if row.embeddings is None:
        return ids
    named = []
    for token in ids:
        if token < 0:
            sent.append(row.embeddings[-1 - token])
        named.append(token if token >= 0 else embedding_base + len(sent) - 1)
    return named
