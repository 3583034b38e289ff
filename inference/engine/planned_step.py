"""One step of the scheduler: the work of each row, laid out as the plan that ranks run."""

# Shapes: E hidden

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inference.decoding.draws import ARG_MAX, UNMARKED, DrawParameters, Penalty, TokenMarks
from inference.decoding.sampling import SampledAnswer
from inference.decoding.tensor_fields import Array
from inference.engine.queued_request import PlannedStep
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
class GeneratingStep(PlannedStep[RunningRequest]):
    """A step, and the rows it works for."""

    work: tuple[RowWork, ...]
    prompt_tokens: int
    encoding: EncoderWork

    @property
    def owners(self) -> list[RunningRequest]:
        """Requests with work in this step, each once."""
        rows = [*self.encoding.rows, *(work.row for work in self.work)]
        return list(dict.fromkeys(row.owner for row in rows))


def lay_out(
    work: Sequence[RowWork],
    encoding: EncoderWork,
    *,
    moves: Sequence[Move],
    entries: Sequence[TableEntry],
    ranks_choose: bool,
    embedding_base: int,
) -> GeneratingStep:
    """Return the step that does this work: by ascending slot, then prompts, each after its sources.

    Ids from `embedding_base` on name the rows of embeddings that are sent with a step.
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
    # Whether the host needs some of the logits.
    needed = [
        (each.samples and not each.row.rank_chooses)
        or (each.is_prompt and each.row.prompt_outputs.wants_logits)
        for each in work
    ]
    choices = _rank_choices(work) if ranks_choose and not all(needed) else {}
    plan = StepPlan(
        ids=ids,
        segments=tuple(segments),
        output_rows=outputs,
        moves=tuple(moves),
        entries=entries,
        **choices,
        with_logits=any(needed) or not choices,
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
    return GeneratingStep(plan, embeddings, overlaps, tuple(work), prompt_tokens, encoding)


def _rank_choices(work: Sequence[RowWork]) -> dict[str, Any]:
    """Return the fields of `StepPlan` that say what ranks choose."""
    choices: list[tuple[int, int]] = []
    draws: list[DrawParameters] = []
    penalties: dict[int, Penalty] = {}  # by place among the choices
    marks: list[tuple[int, TokenMarks]] = []
    for each in work:
        row = each.row
        chooses = each.samples and row.rank_chooses
        unread = len(each.outputs) - chooses
        choices += [(-1, -1)] * unread
        draws += [ARG_MAX] * unread
        if chooses:
            choices.append((each.slot, row.end_id if row.produced < row.min_length else -1))
            assert isinstance(row.decoded, SampledAnswer)
            if row.has_marks:
                penalties[len(draws)] = row.decoded.penalty(row.produced)
                if row.needs_marks:
                    marks.append((each.slot, row.decoded.marks()))
                    row.needs_marks = False
            draws.append(ARG_MAX if row.is_arg_max else row.decoded.draw())
    return {
        "choices": choices,
        "draws": draws if any(draw is not ARG_MAX for draw in draws) else None,
        "penalties": [penalties.get(n, UNMARKED) for n in range(len(draws))] if penalties else None,
        "marks": marks,
    }


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
