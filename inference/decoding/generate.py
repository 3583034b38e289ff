"""The decoder of all running rows: one step turns a batch of logits into the next tokens.

Rows join and leave between steps; what a row decodes never depends on the others.
"""

# Shapes: N slots of all rows of a step, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from inference.decoding.beam_search import BeamRow, PooledBeamRow
from inference.decoding.candidates import Candidates, GroupKey, fetch, select
from inference.decoding.draws import Draw, Marks, Penalty
from inference.decoding.processors import pick_slots, process_logits, token_scores
from inference.decoding.rows import PromptScores, RowRequest, RowResult, RowStep
from inference.decoding.sampling import SamplingRow, choose
from inference.decoding.tensor_fields import Array

UNUSABLE = "the model gave logits that are not finite; no token can be chosen"


@dataclass(frozen=True)
class DecodingConfig:
    """Settings that hold for every row of a model.

    `hypothesis_pool` selects the beam search of encoder-decoder models. `nucleus_include_boundary`
    gives the token that crosses the nucleus boundary its whole mass.
    """

    vocab_size: int
    hypothesis_pool: bool = False
    output_log_probs_mode: Literal["renormalized", "full"] = "renormalized"
    nucleus_include_boundary: bool = False

    def __post_init__(self) -> None:
        if self.output_log_probs_mode not in ("renormalized", "full"):
            raise ValueError(
                f"output_log_probs_mode={self.output_log_probs_mode!r} is unknown; "
                "use renormalized or full"
            )


@dataclass(frozen=True)
class _Group:
    """Rows whose candidates are selected together, and the slots of theirs that still run."""

    key: GroupKey
    rows: list[tuple[int, SamplingRow | BeamRow]]
    slots: list[int]


class BatchDecoder:
    """State of the running rows; a row occupies `beam_width` slots."""

    def __init__(self, config: DecodingConfig) -> None:
        self.config = config
        self._rows: dict[int, SamplingRow | BeamRow] = {}
        self._next_handle = 0

    def add(self, row: RowRequest) -> int:
        """Start a row and return its handle."""
        handle = self._next_handle
        self._next_handle += 1
        vocab_size = self.config.vocab_size
        if row.options.beam_width == 1:
            self._rows[handle] = SamplingRow(
                row,
                vocab_size=vocab_size,
                full_log_probs=self.config.output_log_probs_mode == "full",
            )
        elif self.config.hypothesis_pool:
            self._rows[handle] = PooledBeamRow(row, vocab_size=vocab_size)
        else:
            self._rows[handle] = BeamRow(row, vocab_size=vocab_size)
        return handle

    def slots(self, handle: int) -> int:
        """Return how many rows of logits `step` expects for the row."""
        return self._rows[handle].slots

    @torch.inference_mode()
    def step(self, handles: Sequence[int], logits: torch.Tensor) -> list[RowStep]:
        """Choose the next token of every slot of the given rows, none of which has finished.

        Args:
            handles: rows that take a step; not all that were added need to.
            logits: (N, V) fp32, or wider where the vocabulary is padded, with the slots of the
                rows in the order of `handles`; left as it is.
        """
        groups = self._group(handles, logits)
        steps: dict[int, RowStep] = {}
        for group, candidates in zip(groups, self._candidates(groups, logits), strict=True):
            if isinstance(group.rows[0][1], SamplingRow):
                steps.update(self._sample(group, candidates))
            else:
                steps.update(self._search(group, candidates))
        done = [steps[handle] for handle in handles]
        self._score(done, logits)
        return done

    def _score(self, steps: Sequence[RowStep], logits: torch.Tensor) -> None:
        """Score the newest tokens of the rows that asked for it."""
        wanted: list[tuple[SamplingRow, int, int]] = []  # the row, its slot and its newest token
        slot = 0
        for step in steps:
            row = self._rows[step.handle]
            if isinstance(row, SamplingRow) and row.options.num_log_probs and step.error is None:
                wanted.append((row, slot, step.tokens[0]))
            slot += row.slots
        if not wanted:
            return
        rows, slots, tokens = zip(*wanted, strict=True)
        top = max(row.options.num_log_probs for row in rows)
        found = token_scores(
            pick_slots(logits, slots), tokens, top=top, vocab_size=self.config.vocab_size
        )
        for row, score in zip(rows, found, strict=True):
            row.scores.append(score)

    def rank_chooses(self, handle: int) -> bool:
        """Return whether a rank can choose a row's tokens, by `draw`, marks and a forbidden id."""
        row = self._rows[handle]
        return isinstance(row, SamplingRow) and row.rank_chooses

    def draw(self, handle: int) -> Draw:
        """Return the next draw of a row that `rank_chooses`; its token is given back in order."""
        row = self._rows[handle]
        assert isinstance(row, SamplingRow)
        return row.draw(include_boundary=self.config.nucleus_include_boundary)

    def penalty(self, handle: int, produced: int) -> Penalty:
        """Return the penalty of the next draw of a row with marks; `produced` tokens precede it."""
        row = self._rows[handle]
        assert isinstance(row, SamplingRow)
        return row.penalty(produced)

    def marks(self, handle: int) -> Marks:
        """Return the marks of a row of which no token is being chosen."""
        row = self._rows[handle]
        assert isinstance(row, SamplingRow)
        return row.marks()

    def take_chosen(self, handles: Sequence[int], chosen: Array) -> list[RowStep | None]:
        """Give rows that `rank_chooses` their next tokens; return the steps of those that end.

        Args:
            handles: The rows.
            chosen: (rows, 2) int32, the bits of each one's best logit, and the token.
        """
        usable = np.isfinite(chosen[:, 0].copy().view(np.float32)).tolist()
        steps: list[RowStep | None] = []
        for handle, ok, token in zip(handles, usable, chosen[:, 1].tolist(), strict=True):
            row = self._rows[handle]
            assert isinstance(row, SamplingRow)
            if not ok:
                steps.append(_failed(handle, row.slots, row.options.end_id))
            elif row.append(token):
                steps.append(RowStep(handle, (token,), None, finished=True))
            else:
                steps.append(None)
        return steps

    def generated_ids(self, handle: int) -> Sequence[int]:
        """Return the tokens that a row of one slot has."""
        row = self._rows[handle]
        assert isinstance(row, SamplingRow)
        return row.generated_ids

    def has_tokens(self, handle: int) -> bool:
        """Return whether a row has any tokens yet."""
        return self._rows[handle].generated > 0

    def set_prompt_scores(self, handle: int, scores: PromptScores) -> None:
        """Let a row's results hold the scores of its prompt, which `cum_log_probs` include."""
        self._rows[handle].prompt = scores

    def result(self, handle: int) -> RowResult:
        """Return the result of a row so far; asking does not change the row."""
        return self._rows[handle].result()

    def remove(self, handle: int) -> None:
        """Forget a row, finished or not."""
        del self._rows[handle]

    def _group(self, handles: Sequence[int], logits: torch.Tensor) -> list[_Group]:
        device = logits.device.type
        groups: dict[GroupKey, _Group] = {}
        slot = 0
        for handle in handles:
            row = self._rows[handle]
            assert not row.is_finished, f"row {handle} has finished; remove it"
            key = row.group_key(device)
            group = groups.setdefault(key, _Group(key, [], []))
            group.rows.append((handle, row))
            group.slots.extend(slot + k for k in row.running)
            slot += row.slots
        shape = list(logits.shape)
        assert shape[0] == slot, f"logits {shape} for {slot} slots"
        assert shape[1] >= self.config.vocab_size, f"logits {shape} miss some of the vocabulary"
        return list(groups.values())

    def _candidates(self, groups: Sequence[_Group], logits: torch.Tensor) -> list[Candidates]:
        """Process what needs processing at once, select per group, and fetch everything once."""
        vocab_size = self.config.vocab_size
        changed = [group for group in groups if not group.key.is_plain]
        rules = [rule for group in changed for _, row in group.rows for rule in row.rules()]
        slots = [slot for group in changed for slot in group.slots]
        x = logits
        if changed:
            x = process_logits(logits, slots=slots, rules=rules, vocab_size=vocab_size)
        pending, start = [], 0
        for group in groups:
            if group.key.is_plain:
                rows = pick_slots(logits[:, :vocab_size], group.slots)
            else:
                rows = x[start : start + len(group.slots)]
                start += len(group.slots)
            width = min(group.key.width, vocab_size)
            pending.append(select(rows, width=width, with_norm=group.key.needs_norm))
        return fetch(pending)

    def _sample(self, group: _Group, candidates: Candidates) -> dict[int, RowStep]:
        rows = [row for _, row in group.rows if isinstance(row, SamplingRow)]
        include_boundary = self.config.nucleus_include_boundary
        choices = choose(rows, candidates, include_boundary=include_boundary)
        steps = {}
        for (handle, _), row, choice in zip(group.rows, rows, choices, strict=True):
            if choice is None:
                steps[handle] = _failed(handle, row.slots, row.options.end_id)
            else:
                row.commit(choice)
                finished = row.is_finished
                steps[handle] = RowStep(handle, (choice.token,), None, finished)
        return steps

    def _search(self, group: _Group, candidates: Candidates) -> dict[int, RowStep]:
        steps, start = {}, 0
        for handle, row in group.rows:
            assert isinstance(row, BeamRow)
            own = candidates.rows(start, len(row.running))
            start += len(row.running)
            if np.isfinite(own.values[:, 0]).all():
                tokens, parents = row.advance(own)
                steps[handle] = RowStep(handle, tuple(tokens), tuple(parents), row.is_finished)
            else:
                steps[handle] = _failed(handle, row.slots, row.options.end_id)
        return steps


def _failed(handle: int, slots: int, end_id: int) -> RowStep:
    return RowStep(handle, (end_id,) * slots, None, finished=True, error=UNUSABLE)
