"""The finished hypotheses of one row in the beam search of encoder-decoder models."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inference.decoding.rows import FinishReason, RowResult


@dataclass(frozen=True)
class Hypothesis:
    """A token sequence with its summed log probability and its score over length."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    cum_log_prob: float
    score: float
    reason: FinishReason | None


# Natural logarithm of the largest divisor, and below zero of the least: a double holds more.
_LARGEST_LOG = 300.0


def length_divisor(length: int, *, alpha: float) -> float:
    """Return what a sum of log probabilities over `length` tokens is divided by to rank it."""
    if alpha == 0 or length <= 1:
        return 1.0
    most = _LARGEST_LOG / math.log(length)
    return math.pow(length, max(-most, min(alpha, most)))


class HypothesisPool:
    """Up to `size` hypotheses; the search ends when it is full."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.members: list[Hypothesis] = []

    @property
    def is_full(self) -> bool:
        """True when no more hypotheses are wanted."""
        return len(self.members) >= self._size

    def offer(self, hypothesis: Hypothesis) -> bool:
        """Take a hypothesis; False if the pool is full of better ones.

        A full pool is only met by the later candidates of the step that filled it.
        """
        if not self.is_full:
            self.members.append(hypothesis)
            return True
        worst = min(range(self._size), key=lambda i: self.members[i].score)
        if hypothesis.score < self.members[worst].score:
            return False
        self.members[worst] = hypothesis
        return True


def best_first(hypotheses: list[Hypothesis], *, size: int, with_log_probs: bool) -> RowResult:
    """Return the best `size` of the hypotheses as a result."""
    best = sorted(hypotheses, key=lambda h: -h.score)[:size]
    return RowResult(
        output_ids=tuple(h.tokens for h in best),
        cum_log_probs=tuple(h.cum_log_prob for h in best),
        output_log_probs=tuple(h.log_probs for h in best) if with_log_probs else (),
        finish_reasons=tuple(h.reason for h in best),
    )
