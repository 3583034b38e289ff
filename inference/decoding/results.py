"""What decoding hands back: the step of a row, and its result so far or at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class RowStep:
    """One decoding step of one row.

    `tokens` holds the newest token of each of its lanes, and `parents` the lane (0-based, within
    the row) whose cache each lane continues; None means that every lane continues its own. After
    `finished` the row takes no more steps. A row whose logits were unusable has `error` set and is
    finished; the others are not affected.
    """

    handle: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None
    finished: bool
    error: str | None = None


@dataclass(frozen=True)
class RowResult:
    """The K hypotheses of one row, best first; only generated tokens, the end token included.

    `output_log_probs` is empty unless the row asked for log probabilities. A finish reason of
    None marks a hypothesis that still runs.
    """

    output_ids: tuple[tuple[int, ...], ...]
    cum_log_probs: tuple[float, ...]
    output_log_probs: tuple[tuple[float, ...], ...]
    finish_reasons: tuple[FinishReason | None, ...]
