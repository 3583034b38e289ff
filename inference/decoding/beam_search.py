"""Rows that follow several hypotheses at once: the two beam searches of the serving contract.

Decoder-only models keep finished beams in the beam, where they compete with a frozen score;
encoder-decoder models move them to a pool. Source: FasterTransformer 5.3,
kernels/online_softmax_beamsearch_kernels.cu, with every hypothesis scored by its own tokens and
its own length.
"""

# Shapes: K beams, m running beams, W candidates of a beam, R tokens asked for

import math
from typing import NamedTuple

import numpy as np

from inference.decoding.answer import GrowingAnswer
from inference.decoding.candidates import Candidates, GroupKey
from inference.decoding.processors import LogitRules, temperature_divisor
from inference.decoding.rows import FinishReason, SequenceRequest, SequenceResult
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import ends_with

# The score that every beam but the first starts from, so that the first step fills all from one.
UNSTARTED = -1e20


class Hypothesis(NamedTuple):
    """A token sequence with its log probabilities, and its score over length once it is ranked."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0
    reason: FinishReason | None = None
    score: float = 0.0


# Natural logarithm of the largest divisor, and below zero of the least: a double holds more.
_LARGEST_LOG = 300.0


def length_divisor(length: int, *, alpha: float) -> float:
    """Return what a sum of log probabilities over `length` tokens is divided by to rank it."""
    if alpha == 0 or length <= 1:
        return 1.0
    most = _LARGEST_LOG / math.log(length)
    return math.pow(length, max(-most, min(alpha, most)))


class Extensions(NamedTuple):
    """All extensions of a row's beams in one step, best first; each array is (count,)."""

    parents: Array
    tokens: Array
    cum_log_probs: Array  # fp64
    log_probs: Array  # of the new token alone
    scores: Array


class BeamSearch(GrowingAnswer):
    """A decoder-only beam search; beams are kept in the order of their last ranking."""

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        super().__init__(request, vocab_size=vocab_size)
        o = self.options
        self.slots = o.beam_width
        self.generated = 0
        self.beams = [Hypothesis(), *[Hypothesis(cum_log_prob=UNSTARTED)] * (self.slots - 1)]
        self._tail = max((len(word) for word in o.bad_words + o.stop_words), default=0)

    @property
    def is_finished(self) -> bool:
        """True when no beam runs any more."""
        return self.error is not None or not self.running

    @property
    def running(self) -> list[int]:
        """The slots whose logits matter."""
        return [k for k, beam in enumerate(self.beams) if beam.reason is None]

    def group_key(self, device: str) -> GroupKey:
        """Return what this step's selection needs: twice K extensions of each beam."""
        del device
        return GroupKey("beam", 2 * self.slots, True)

    def rules(self) -> list[LogitRules]:
        """Return what to do to the logits of each running slot in this step."""
        divisor = temperature_divisor(self.options.temperature)
        penalty, forbidden = self.penalty(self.generated), self._forbidden(self.generated)
        rules = []
        for tokens in (self.beams[k].tokens for k in self.running):
            marks = self._marks(tokens, self._newest(tokens))
            rules.append(LogitRules(1.0, divisor, penalty, marks, forbidden))
        return rules

    def _newest(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the last tokens of an answer, prompt included: as many as a word list can see."""
        if not self._tail:
            return ()
        return self.request.context_ids[-self._tail :] + tokens[-self._tail :]

    def advance(self, candidates: Candidates) -> None:
        """Take the step."""
        # All beams of a row share this length: its own cache entries, not the padded ones.
        best = self._extensions(candidates, length=self.request.context_len + self.generated)
        self.beams = [self._extended(best, i) for i in range(self.slots)]
        self.generated += 1
        self.tokens = tuple(best.tokens[: self.slots].tolist())
        self.parents = best.parents[: self.slots].tolist()

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
        cum = np.array([beam.cum_log_prob for beam in self.beams])[:, None] + log_probs
        ranks = np.arange(shape[1]) % self.slots
        scores = cum / length_divisor(length, alpha=self.options.len_penalty)
        scores = scores + self.options.beam_search_diversity_rate * ranks
        order = np.argsort(-scores, axis=None, kind="stable")  # ties: lower beam, then higher rank
        columns = (each.ravel()[order] for each in (tokens, cum, log_probs, scores))
        return Extensions(order // shape[1], *columns)

    def _extended(self, best: Extensions, i: int) -> Hypothesis:
        """Return a beam with its extension, or a finished one as it is."""
        parent: Hypothesis = self.beams[best.parents[i]]
        if parent.reason is not None:
            return parent
        token, words = int(best.tokens[i]), self.options.stop_words
        tokens = (*parent.tokens, token)
        reason: FinishReason | None = "length" if len(tokens) == self.request.output_len else None
        if token in self.options.end_ids:
            reason = "end"
        elif words and ends_with((*self._newest(parent.tokens), token), words):
            reason = "stop"
        return Hypothesis(
            tokens=tokens,
            log_probs=(*parent.log_probs, float(best.log_probs[i])),
            cum_log_prob=float(best.cum_log_probs[i]),
            reason=reason,
            score=float(best.scores[i]),
        )

    def hypotheses(self) -> list[Hypothesis]:
        """Return the beams in their order."""
        return self.beams

    def result(self) -> SequenceResult:
        """Return the row so far."""
        found, with_log_probs = self.hypotheses(), self.options.return_log_probs
        return SequenceResult(
            output_ids=tuple(h.tokens for h in found),
            cum_log_probs=tuple(self.prompt.log_prob + h.cum_log_prob for h in found),
            output_log_probs=tuple(h.log_probs for h in found) if with_log_probs else (),
            finish_reasons=tuple(h.reason for h in found),
            prompt=self.prompt,
        )


class PooledBeamSearch(BeamSearch):
    """An encoder-decoder beam search, which ends when its pool of hypotheses is full."""

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        super().__init__(request, vocab_size=vocab_size)
        self._pool: list[Hypothesis] = []  # those that have finished

    @property
    def _is_full(self) -> bool:
        return len(self._pool) >= self.slots

    @property
    def is_finished(self) -> bool:
        """True when the pool is full or the answer has its length."""
        is_done = self._is_full or self.generated == self.request.output_len
        return self.error is not None or is_done

    def advance(self, candidates: Candidates) -> None:
        """Take the step."""
        best = self._extensions(candidates, length=self.generated + 1)
        kept: list[Hypothesis] = []
        parents = [0] * self.slots
        for i, parent in enumerate(best.parents.tolist()):
            if len(kept) == self.slots:
                break
            extended = self._extended(best, i)
            if extended.reason in (None, "length"):
                parents[len(kept)] = parent
                kept.append(extended)
            elif i < self.slots and not self._offer(extended):
                break
        # Fewer than K extensions go on only where the vocabulary is tiny; those slots are dead.
        first, tokens = self.beams[0], (*self.beams[0].tokens, self.options.end_id)
        reason: FinishReason | None = "length" if len(tokens) == self.request.output_len else None
        dead = Hypothesis(tokens, (*first.log_probs, 0.0), UNSTARTED, reason)
        self.beams = kept + [dead] * (self.slots - len(kept))
        self.generated += 1
        self.tokens = tuple(beam.tokens[-1] for beam in self.beams)
        self.parents = parents

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

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best of pool and running beams, best first."""
        divisor = length_divisor(self.generated, alpha=self.options.len_penalty)
        beams = [] if self._is_full else self.beams
        running = [beam._replace(score=beam.cum_log_prob / divisor) for beam in beams]
        return sorted(self._pool + running, key=lambda h: -h.score)[: self.slots]
