"""The decoder of all running rows: one step turns a batch of logits into the next tokens.

Rows join and leave between steps; what a row decodes never depends on the others.
"""

# Shapes: N slots of all rows of a step, V vocabulary

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from inference.decoding.beam_search import BeamRow, PooledBeamRow
from inference.decoding.candidates import Candidates, GroupKey, select
from inference.decoding.processors import pick_slots, process_logits, token_scores
from inference.decoding.rows import RowRequest, RowStep
from inference.decoding.sampling import SamplingRow, choose
from inference.decoding.tensor_fields import Array

UNUSABLE = "the model gave logits that are not finite; no token can be chosen"


# One row, from its first token to its result.
DecodedRow = SamplingRow | BeamRow


# Rows whose candidates are selected together, and the slots of theirs that still run.
_Groups = dict[GroupKey, tuple[list[DecodedRow], list[int]]]


class BatchDecoder:
    """Chooses the tokens of the rows that it makes; a row occupies `beam_width` slots."""

    def __init__(
        self,
        vocab_size: int,
        *,
        hypothesis_pool: bool = False,
        output_log_probs_mode: Literal["renormalized", "full"] = "renormalized",
        nucleus_include_boundary: bool = False,
    ) -> None:
        """Take the settings that hold for every row of a model.

        `hypothesis_pool` selects the beam search of encoder-decoder models.
        `nucleus_include_boundary` gives the token that crosses the nucleus boundary its whole mass.
        """
        self.vocab_size = vocab_size
        self._beam_row = PooledBeamRow if hypothesis_pool else BeamRow
        self._full_log_probs = output_log_probs_mode == "full"
        self._include_boundary = nucleus_include_boundary

    def make_row(self, request: RowRequest) -> DecodedRow:
        """Return a row without tokens."""
        if request.options.beam_width > 1:
            return self._beam_row(request, vocab_size=self.vocab_size)
        return SamplingRow(
            request,
            vocab_size=self.vocab_size,
            full_log_probs=self._full_log_probs,
            include_boundary=self._include_boundary,
        )

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodedRow], logits: torch.Tensor) -> list[RowStep]:
        """Choose the next token of every slot of the given rows, none of which has finished.

        `logits`, (N, V) fp32 or wider, have the slots of the rows in their order; they are kept.
        """
        groups = self._group(rows, logits)
        steps: dict[DecodedRow, RowStep] = {}
        found = self._candidates(groups, logits)
        for (members, _), candidates in zip(groups.values(), found, strict=True):
            sampled = [row for row in members if isinstance(row, SamplingRow)]
            beams = [row for row in members if isinstance(row, BeamRow)]
            taken = _sample(sampled, candidates) if sampled else _search(beams, candidates)
            steps.update(zip(members, taken, strict=True))
        done = [steps[row] for row in rows]
        self._score(rows, done, logits)
        return done

    def _score(
        self, rows: Sequence[DecodedRow], steps: Sequence[RowStep], logits: torch.Tensor
    ) -> None:
        """Score the newest tokens of the rows that asked for it."""
        wanted: list[tuple[SamplingRow, int, int]] = []  # the row, its slot and its newest token
        slot = 0
        for row, step in zip(rows, steps, strict=True):
            if isinstance(row, SamplingRow) and row.options.num_log_probs and step.error is None:
                wanted.append((row, slot, step.tokens[0]))
            slot += row.slots
        if not wanted:
            return
        scored, slots, tokens = zip(*wanted, strict=True)
        top = max(row.options.num_log_probs for row in scored)
        found = token_scores(pick_slots(logits, slots), tokens, top=top, vocab_size=self.vocab_size)
        for row, score in zip(scored, found, strict=True):
            row.scores.append(score)

    def _group(self, rows: Sequence[DecodedRow], logits: torch.Tensor) -> _Groups:
        device = logits.device.type
        groups: _Groups = {}
        slot = 0
        for row in rows:
            assert not row.is_finished, "a finished row takes no steps"
            members, running = groups.setdefault(row.group_key(device), ([], []))
            members.append(row)
            running.extend(slot + k for k in row.running)
            slot += row.slots
        shape = list(logits.shape)
        assert shape[0] == slot, f"logits {shape} for {slot} slots"
        assert shape[1] >= self.vocab_size, f"logits {shape} miss some of the vocabulary"
        return groups

    def _candidates(self, groups: _Groups, logits: torch.Tensor) -> list[Candidates]:
        """Process what needs processing at once, and select per group."""
        vocab_size = self.vocab_size
        changed = [group for key, group in groups.items() if key.kind != "plain"]
        rules = [rule for members, _ in changed for row in members for rule in row.rules()]
        slots = [slot for _, running in changed for slot in running]
        x = logits
        if changed:
            x = process_logits(logits, slots=slots, rules=rules, vocab_size=vocab_size)
        found, start = [], 0
        for key, (_, running) in groups.items():
            if key.kind == "plain":
                rows = pick_slots(logits[:, :vocab_size], running)
            else:
                rows = x[start : start + len(running)]
                start += len(running)
            width = min(key.width, vocab_size)
            found.append(select(rows, width=width, with_norm=key.needs_norm))
        return found


def _sample(rows: Sequence[SamplingRow], candidates: Candidates) -> list[RowStep]:
    steps = []
    for row, choice in zip(rows, choose(rows, candidates), strict=True):
        if choice is None:
            steps.append(_failed(row))
        else:
            row.commit(choice)
            steps.append(RowStep((choice.token,), None, row.is_finished))
    return steps


def _search(rows: Sequence[BeamRow], candidates: Candidates) -> list[RowStep]:
    steps, start = [], 0
    for row in rows:
        own = candidates.rows(start, len(row.running))
        start += len(row.running)
        if np.isfinite(own.values[:, 0]).all():
            tokens, parents = row.advance(own)
            steps.append(RowStep(tuple(tokens), tuple(parents), row.is_finished))
        else:
            steps.append(_failed(row))
    return steps


def take_chosen(rows: Sequence[SamplingRow], chosen: Array) -> list[RowStep | None]:
    """Give rows the tokens that a rank chose for them; return the steps of those that end.

    `chosen` (rows, 2) int32 holds the bits of each one's best logit, and the token.
    """
    usable = np.isfinite(chosen[:, 0].copy().view(np.float32)).tolist()
    steps: list[RowStep | None] = []
    for row, ok, token in zip(rows, usable, chosen[:, 1].tolist(), strict=True):
        if not ok:
            steps.append(_failed(row))
        elif row.append(token):
            steps.append(RowStep((token,), None, finished=True))
        else:
            steps.append(None)
    return steps


def _failed(row: DecodedRow) -> RowStep:
    constraint = row.request.constraint
    problem = (constraint.problem if constraint is not None else "") or UNUSABLE
    return RowStep((row.options.end_id,) * row.slots, None, finished=True, error=problem)
