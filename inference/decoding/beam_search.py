"""Rows that follow several hypotheses at once: the two beam searches of the serving contract.

Decoder-only models keep finished beams in the beam, where they compete with a frozen score;
encoder-decoder models move them to a pool. Source: FasterTransformer 5.3,
kernels/online_softmax_beamsearch_kernels.cu, with every hypothesis scored by its own tokens and
its own length.
"""

# Shapes: K beams, m running beams, W candidates of a beam, R tokens asked for

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference.decoding.candidates import Candidates, GroupKey
from inference.decoding.draws import RowBias, SeenIds, join_bias
from inference.decoding.processors import LogitRules
from inference.decoding.rows import FinishReason, PromptScores, RowRequest, RowResult
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import banned_ids, ends_with

# What every beam but the first starts from, so that the first step fills all from one.
UNSTARTED = -1e20


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


@dataclass(frozen=True)
class Extensions:
    """All extensions of a row's beams in one step, best first; each array is (count,)."""

    parents: Array
    tokens: Array
    cum_log_probs: Array  # fp64
    log_probs: Array  # of the new token alone
    scores: Array


class BeamRow:
    """One row of a decoder-only beam search; beams are kept in the order of their last ranking."""

    rank_chooses = False

    def __init__(self, request: RowRequest, *, vocab_size: int) -> None:
        self.request = request
        self.options = o = request.options
        self.slots = o.beam_width
        self.generated = 0
        self.tokens = np.zeros((self.slots, request.output_len), np.int64)  # (K, R)
        self.log_probs = np.zeros((self.slots, request.output_len), np.float32)  # (K, R)
        self.cum_log_probs = np.full(self.slots, UNSTARTED)
        self.cum_log_probs[0] = 0.0
        self.lengths = np.zeros(self.slots, np.int64)
        self.reasons: list[FinishReason | None] = [None] * self.slots
        self._vocab_size = vocab_size
        self.prompt = PromptScores()
        self._tail = max((len(word) for word in o.bad_words + o.stop_words), default=0)
        # What all beams share; each has its own answer.
        self._logit_bias = RowBias(o, output_len=0).arrays()
        self._prompt_ids = SeenIds(request.context_ids, 0, vocab_size=vocab_size).ids(0)

    @property
    def is_finished(self) -> bool:
        """True when no beam runs any more."""
        return None not in self.reasons

    @property
    def running(self) -> list[int]:
        """The slots whose logits matter."""
        return [k for k, reason in enumerate(self.reasons) if reason is None]

    def group_key(self, device: str) -> GroupKey:
        """Return what this step's selection needs: twice K extensions of each beam."""
        del device
        return GroupKey("beam", 2 * self.slots, True)

    def rules(self) -> list[LogitRules]:
        """Return what to do to the logits of each running slot in this step."""
        o = self.options
        penalised = o.is_penalised and self.request.context_len + self.generated > 1
        forbidden_id = o.end_id if self.generated < o.min_length else None
        rules = []
        for k in self.running:
            answer = self.tokens[k, : self.generated]
            seen = np.concatenate([self._prompt_ids, answer]) if penalised else None
            rules.append(LogitRules(o, self._biases(k), seen, forbidden_id))
        return rules

    def _biases(self, k: int) -> tuple[Array, Array] | None:
        o, parts = self.options, [self._logit_bias] if self.options.logit_bias else []
        if o.frequency_penalty:
            ids, counts = np.unique(self.tokens[k, : self.generated], return_counts=True)
            parts.append((ids, -np.float32(o.frequency_penalty) * counts.astype(np.float32)))
        banned = banned_ids(self.newest(k), o.bad_words, self._vocab_size)
        return join_bias(*parts, banned=banned)

    def newest(self, k: int, *extension: int) -> list[int]:
        """Return the last tokens of beam k, prompt included: as many as a word list can see."""
        if not self._tail:
            return []
        answer = self.tokens[k, : self.lengths[k]][-self._tail :].tolist()
        context = self.request.context_ids[-self._tail :]
        return [*context, *answer, *extension]

    def advance(self, candidates: Candidates) -> tuple[Sequence[int], Sequence[int]]:
        """Take the step; return the newest token and the parent of each slot."""
        # All beams of a row share this length: its own cache entries, not the padded ones.
        best = self._extensions(candidates, length=self.request.context_len + self.generated)
        parents = best.parents[: self.slots]
        old_reasons = [self.reasons[k] for k in parents]
        self._reorder(parents)
        for k, reason in enumerate(old_reasons):
            self.reasons[k] = reason
            if reason is None:
                self._append(k, best, k)
                self.reasons[k] = self._reason(k)
        self.generated += 1
        return best.tokens[: self.slots].tolist(), parents.tolist()

    def _extensions(self, candidates: Candidates, *, length: int) -> Extensions:
        """Rank all extensions; a finished beam has one, by its end id at no cost."""
        shape = (self.slots, candidates.values.shape[1])
        running = self.running
        log_probs = np.full(shape, -np.inf)  # (K, W)
        tokens = np.full(shape, self.options.end_id)
        log_probs[:, 0] = 0.0
        assert candidates.log_norms is not None
        values = candidates.values.astype(np.float64)  # (m, W)
        log_probs[running] = values - values[:, :1] - candidates.log_norms[:, None]
        tokens[running] = candidates.ids
        cum = self.cum_log_probs[:, None] + log_probs
        ranks = np.arange(shape[1]) % self.slots
        scores = cum / length_divisor(length, alpha=self.options.len_penalty)
        scores = scores + self.options.beam_search_diversity_rate * ranks
        order = np.argsort(-scores, axis=None, kind="stable")  # ties: lower beam, then higher rank
        return Extensions(
            parents=order // shape[1],
            tokens=tokens.ravel()[order],
            cum_log_probs=cum.ravel()[order],
            log_probs=log_probs.ravel()[order],
            scores=scores.ravel()[order],
        )

    def _reorder(self, parents: Array) -> None:
        n = self.generated
        self.tokens[:, :n] = self.tokens[parents, :n]
        self.log_probs[:, :n] = self.log_probs[parents, :n]
        self.lengths = self.lengths[parents]
        self.cum_log_probs = self.cum_log_probs[parents]

    def _append(self, k: int, extensions: Extensions, i: int) -> None:
        self.tokens[k, self.generated] = extensions.tokens[i]
        self.log_probs[k, self.generated] = extensions.log_probs[i]
        self.cum_log_probs[k] = extensions.cum_log_probs[i]
        self.lengths[k] += 1

    def _reason(self, k: int) -> FinishReason | None:
        if self.tokens[k, self.lengths[k] - 1] == self.options.end_id:
            return "end"
        if self.options.stop_words and ends_with(self.newest(k), self.options.stop_words):
            return "stop"
        return "length" if self.lengths[k] == self.request.output_len else None

    def hypothesis(self, k: int) -> Hypothesis:
        """Return beam k as it stands."""
        n = int(self.lengths[k])
        cum = float(self.cum_log_probs[k])
        return Hypothesis(
            tokens=tuple(self.tokens[k, :n].tolist()),
            log_probs=tuple(self.log_probs[k, :n].tolist()),
            cum_log_prob=cum,
            score=cum / length_divisor(n, alpha=self.options.len_penalty),
            reason=self.reasons[k],
        )

    def hypotheses(self) -> list[Hypothesis]:
        """Return the beams in their order."""
        return [self.hypothesis(k) for k in range(self.slots)]

    def result(self) -> RowResult:
        """Return the row so far."""
        found, with_log_probs = self.hypotheses(), self.options.return_log_probs
        return RowResult(
            output_ids=tuple(h.tokens for h in found),
            cum_log_probs=tuple(self.prompt.log_prob + h.cum_log_prob for h in found),
            output_log_probs=tuple(h.log_probs for h in found) if with_log_probs else (),
            finish_reasons=tuple(h.reason for h in found),
        )


class PooledBeamRow(BeamRow):
    """One row of an encoder-decoder beam search, which ends when its pool of hypotheses is full."""

    def __init__(self, request: RowRequest, *, vocab_size: int) -> None:
        super().__init__(request, vocab_size=vocab_size)
        self._pool: list[Hypothesis] = []  # those that have finished

    @property
    def _is_full(self) -> bool:
        return len(self._pool) >= self.slots

    def advance(self, candidates: Candidates) -> tuple[Sequence[int], Sequence[int]]:
        """Take the step; return the newest token and the parent of each running beam."""
        best = self._extensions(candidates, length=self.generated + 1)
        kept = self._pick(best)
        # Fewer than K extensions go on only where the vocabulary is tiny; those slots are dead.
        dead = self.slots - len(kept)
        parents = np.asarray([int(best.parents[i]) for i in kept] + [0] * dead)
        self._reorder(parents)
        for k, i in enumerate(kept):
            self._append(k, best, i)
        for k in range(len(kept), self.slots):
            self.tokens[k, self.generated] = self.options.end_id
            self.cum_log_probs[k] = UNSTARTED
            self.lengths[k] += 1
        self.generated += 1
        if self._is_full:
            self.reasons = ["end"] * self.slots
        elif self.generated == self.request.output_len:
            self.reasons = ["length"] * self.slots
        return self.tokens[:, self.generated - 1].tolist(), parents.tolist()

    def _pick(self, best: Extensions) -> list[int]:
        """Move what ends to the pool and return the extensions that go on."""
        kept: list[int] = []
        for i in range(len(best.tokens)):
            reason = self._ending(int(best.parents[i]), int(best.tokens[i]))
            if reason is None:
                kept.append(i)
            elif i < self.slots and not self._offer(self._ended(best, i, reason)):
                break
            if len(kept) == self.slots:
                break
        return kept

    def _offer(self, hypothesis: Hypothesis) -> bool:
        """Take a hypothesis into the pool; False if it is full of better ones.

        A full pool is only met by the later candidates of the step that filled it.
        """
        if not self._is_full:
            self._pool.append(hypothesis)
            return True
        worst = min(range(self.slots), key=lambda i: self._pool[i].score)
        if hypothesis.score < self._pool[worst].score:
            return False
        self._pool[worst] = hypothesis
        return True

    def _ending(self, parent: int, token: int) -> FinishReason | None:
        if token == self.options.end_id:
            return "end"
        words = self.options.stop_words
        return "stop" if words and ends_with(self.newest(parent, token), words) else None

    def _ended(self, best: Extensions, i: int, reason: FinishReason) -> Hypothesis:
        parent = self.hypothesis(int(best.parents[i]))
        return Hypothesis(
            tokens=(*parent.tokens, int(best.tokens[i])),
            log_probs=(*parent.log_probs, float(best.log_probs[i])),
            cum_log_prob=float(best.cum_log_probs[i]),
            score=float(best.scores[i]),
            reason=reason,
        )

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best of pool and running beams, best first."""
        running = [] if self._is_full else super().hypotheses()
        return sorted(self._pool + running, key=lambda h: -h.score)[: self.slots]
