"""One step of the scheduler: chunks of sequences, laid out as the plan that ranks run."""

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
from inference.engine.sequence import RunningSequence
from inference.model.kv_cache import Move, TableEntry
from inference.model.step import Segment
from inference.ranks.plan import EncoderRow, StepPlan


@dataclass(slots=True)
class Chunk:
    """Tokens of a sequence that a step computes in one of its slots."""

    sequence: RunningSequence
    slot: int
    ids: list[int]
    outputs: int = 1  # logits are wanted for the last `outputs` tokens
    samples: bool = True  # whether a token is chosen from the last logits
    first: int = 0  # index of `ids[0]` in the conversation
    is_prompt: bool = False


@dataclass(frozen=True)
class EncoderWork:
    """The sequences for which a step runs some of the encoder's layers.

    `begins` marks the first step of their pass. `tokens` is the cost, as the number of tokens that
    all layers could process in the same time.
    """

    sequences: tuple[RunningSequence, ...] = ()
    layers: int = 0
    begins: bool = False
    tokens: int = 0


@dataclass(frozen=True)
class GeneratingStep(PlannedStep):
    """A step of generation with its chunks.

    `prompt_tokens` are those of prompts, and the encoder's work as a number of tokens.
    """

    chunks: Sequence[Chunk]
    prompt_tokens: int


def lay_out(
    chunks: Sequence[Chunk],
    encoding: EncoderWork,
    *,
    moves: Sequence[Move],
    entries: Sequence[TableEntry],
    ranks_choose: bool,
    embedding_base: int,
) -> GeneratingStep:
    """Return the step for chunks: decoding ones by ascending slot, then prompts.

    Ids from `embedding_base` on name rows of the embeddings that are sent with a step.
    """
    ids: list[int] = []
    outputs: list[int] = []
    sent: list[Array] = []
    segments: list[Segment] = []
    for chunk in chunks:
        table, stop = chunk.sequence.table, len(ids) + len(chunk.ids)
        shift = table.forgotten + table.shift
        segments.append(Segment(chunk.slot, table.held, len(chunk.ids), shift))
        outputs += range(stop - chunk.outputs, stop)
        if chunk.is_prompt:
            ids += _with_sent(chunk.sequence, chunk.ids, sent, embedding_base)
        else:
            ids += chunk.ids
    encoder_ids: list[int] = []
    begun = encoding.sequences if encoding.begins else ()
    for sequence in begun:
        encoder_ids += _with_sent(sequence, sequence.encoder_ids or [], sent, embedding_base)
    prompts = [chunk for chunk in chunks if chunk.is_prompt]
    # Whether the host needs logits of each chunk.
    needed = [
        (chunk.samples and not chunk.sequence.answer.rank_chooses)
        or (chunk.is_prompt and chunk.sequence.prompt_outputs.wants_logits)
        for chunk in chunks
    ]
    choices = _rank_choices(chunks) if ranks_choose and not all(needed) else {}
    plan = StepPlan(
        ids=ids,
        segments=tuple(segments),
        output_rows=outputs,
        moves=tuple(moves),
        entries=entries,
        **choices,
        with_logits=any(needed) or not choices,
        # A chunk may contain none of the rows that its request sent.
        has_virtual=bool(sent)
        or any(
            sequence.uses_prompt_table
            for sequence in (*begun, *(chunk.sequence for chunk in prompts))
        ),
        embedding_rows=len(sent),
        pool=any(chunk.sequence.prompt_outputs.wants_pooled for chunk in prompts),
        encoder_rows=tuple(
            EncoderRow(each.encoder_len, tuple(each.slots), each.request.ia3_task) for each in begun
        ),
        encoder_ids=encoder_ids,
        encoder_layers=encoding.layers,
    )
    embeddings = torch.from_numpy(np.stack(sent)) if sent else None
    prompt_tokens = sum(len(chunk.ids) for chunk in prompts) + encoding.tokens
    # The host reads logits and pooled states before it can plan the next step.
    overlaps = not (plan.with_logits or plan.pool)
    sequences = [*encoding.sequences, *(chunk.sequence for chunk in chunks)]
    owners = list(dict.fromkeys(sequence.owner for sequence in sequences))
    return GeneratingStep(plan, embeddings, overlaps, owners, chunks, prompt_tokens)


def _rank_choices(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Return the fields of `StepPlan` by which ranks choose tokens."""
    choices: list[tuple[int, int]] = []
    draws: list[DrawParameters] = []
    penalties: dict[int, Penalty] = {}  # by index of the choice
    marks: list[tuple[int, TokenMarks]] = []
    for chunk in chunks:
        sequence, answer = chunk.sequence, chunk.sequence.answer
        chooses = chunk.samples and answer.rank_chooses
        unread = chunk.outputs - chooses
        choices += [(-1, -1)] * unread
        draws += [ARG_MAX] * unread
        if chooses:
            assert isinstance(answer, SampledAnswer)
            forbidden = answer.forbidden_ids(sequence.produced)  # at most one
            choices.append((chunk.slot, forbidden[0] if forbidden else -1))
            if answer.options.has_marks:
                penalties[len(draws)] = answer.penalty(sequence.produced)
                if sequence.needs_marks:
                    marks.append((chunk.slot, answer.marks()))
                    sequence.needs_marks = False
            draws.append(answer.draw())
    return {
        "choices": choices,
        "draws": draws if any(draw is not ARG_MAX for draw in draws) else None,
        "penalties": [penalties.get(n, UNMARKED) for n in range(len(draws))] if penalties else None,
        "marks": marks,
    }


def _with_sent(
    sequence: RunningSequence, ids: list[int], sent: list[Array], embedding_base: int
) -> list[int]:
    """Return `ids` with sent embeddings numbered as rows of `sent`, to which they are added."""
    if sequence.embeddings is None:
        return ids
    named = []
    for token in ids:
        if token < 0:
            sent.append(sequence.embeddings[-1 - token])
        named.append(token if token >= 0 else embedding_base + len(sent) - 1)
    return named
