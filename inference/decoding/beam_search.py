"""The two beam searches of the serving contract.

Decoder-only models keep finished beams in the beam, where they compete with a frozen score;
encoder-decoder models move them to a pool. Source: FasterTransformer 5.3,
kernels/online_softmax_beamsearch_kernels.cu; but every hypothesis is scored by its own tokens and
its own length.
"""

# Shapes: K beams, m running beams, W candidates of a beam, R tokens requested

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from inference.decoding.answer import GrowingAnswer
from inference.decoding.candidates import Candidates
from inference.decoding.processors import LogitRules, temperature_divisor
from inference.decoding.rows import FinishReason, SequenceRequest, SequenceResult
from inference.decoding.word_lists import TokenIds, ends_with

# Initial score of all beams but the first, so that the first step extends the first beam only.
UNSTARTED = -1e20


class Hypothesis(NamedTuple):
    """A token sequence with its log probabilities; `score` (over length) is set by ranking."""

    tokens: TokenIds = ()
    log_probs: tuple[float, ...] = ()
    cum_log_prob: float = 0.0
    reason: FinishReason | None = None
    score: float = 0.0


# The divisor stays within exp(-300) and exp(300), which a double can hold.
_MAX_LOG = 300.0


def length_divisor(length: int, *, alpha: float) -> float:
    """Return length**alpha, the divisor of a sum of `length` log probabilities for its ranking."""
    if alpha == 0 or length <= 1:
        return 1.0
    limit = _MAX_LOG / math.log(length)
    return math.pow(length, max(-limit, min(alpha, limit)))


class BeamSearch(GrowingAnswer):
    """A decoder-only beam search; beams stay in the order of their last ranking."""

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        super().__init__(request, vocab_size=vocab_size)
        o = self.options
        self.slots = o.beam_width
        self.generated = 0
        self.beams = [Hypothesis(), *[Hypothesis(cum_log_prob=UNSTARTED)] * (self.slots - 1)]
        self._tail = max((len(word) for word in o.bad_words + o.stop_words), default=1)

    @property
    def is_finished(self) -> bool:
        """True when no beam is running."""
        return self.error is not None or not self.running

    @property
    def running(self) -> list[int]:
        """The slots of unfinished beams, whose logits are used."""
        return [k for k, beam in enumerate(self.beams) if beam.reason is None]

    is_plain = False

    def width(self, device: str) -> int:
        """Return how many extensions of each beam a step considers: twice K."""
        del device
        return 2 * self.slots

    def rules(self) -> list[LogitRules]:
        """Return the rules for the logits of each running slot in this step."""
        divisor = temperature_divisor(self.options.temperature)
        penalty, forbidden = self.penalty(self.generated), self.forbidden_ids(self.generated)
        rules = []
        for tokens in (self.beams[k].tokens for k in self.running):
            marks = self._marks(tokens, self._newest(tokens))
            rules.append(LogitRules(1.0, divisor, penalty, marks, forbidden))
        return rules

    def _newest(self, tokens: TokenIds) -> TokenIds:
        """Return the last tokens of prompt and answer, enough for the longest word of a list."""
        return self.request.context_ids[-self._tail :] + tokens[-self._tail :]

    def advance(self, candidates: Candidates) -> None:
        """Extend the beams by one token."""
        # All beams of a row have the same length, which counts no padding.
        extensions = self._extensions(candidates, self.request.context_len + self.generated)
        self._continue_from(list(itertools.islice(extensions, self.slots)))

    def _continue_from(self, beams: Sequence[tuple[int, Hypothesis]]) -> None:
        """Replace the beams by extended ones, each with the slot of its parent."""
        self.parents = [parent for parent, _ in beams]
        self.beams = [beam for _, beam in beams]
        self.tokens = tuple(beam.tokens[-1] for beam in self.beams)
        self.generated += 1

    def _extensions(self, candidates: Candidates, length: int) -> Iterator[tuple[int, Hypothesis]]:
        """Yield all extensions, best first, each with the slot of its parent.

        A finished beam has one extension, itself unchanged.
        """
        running = self.running
        values = candidates.values.astype(np.float64)  # (m, W)
        shape = (self.slots, values.shape[1])
        log_probs = np.full(shape, -np.inf)  # (K, W)
        tokens = np.full(shape, self.options.end_id)
        log_probs[:, 0] = 0.0
        assert candidates.log_norms is not None
        log_probs[running] = values - values[:, :1] - candidates.log_norms[:, None]
        tokens[running] = candidates.ids
        cum = np.array([beam.cum_log_prob for beam in self.beams])[:, None] + log_probs
        ranks = np.arange(shape[1]) % self.slots
        scores = cum / length_divisor(length, alpha=self.options.len_penalty)
        scores = scores + self.options.beam_search_diversity_rate * ranks
        order = np.argsort(-scores, axis=None, kind="stable")  # ties: lower beam, then higher rank
        columns = (each.ravel()[order].tolist() for each in (tokens, log_probs, cum, scores))
        for parent, *numbers in zip((order // shape[1]).tolist(), *columns, strict=True):
            beam = self.beams[parent]
            yield parent, beam if beam.reason is not None else self._extended(beam, *numbers)

    def _extended(
        self, beam: Hypothesis, token: int, log_prob: float, cum_log_prob: float, score: float
    ) -> Hypothesis:
        tokens, words = (*beam.tokens, token), self.options.stop_words
        reason: FinishReason | None = "length" if len(tokens) == self.request.output_len else None
        if token in self.options.end_ids:
            reason = "end"
        elif words and ends_with((*self._newest(beam.tokens), token), words):
            reason = "stop"
        return Hypothesis(tokens, (*beam.log_probs, log_prob), cum_log_prob, reason, score)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the beams, best first."""
        return self.beams

    def result(self) -> SequenceResult:
        """Return the hypotheses so far."""
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
        self._pool: list[Hypothesis] = []  # finished hypotheses

    @property
    def _is_full(self) -> bool:
        return len(self._pool) >= self.slots

    @property
    def is_finished(self) -> bool:
        """True when the pool is full or the answer has reached its length."""
        is_done = self._is_full or self.generated == self.request.output_len
        return self.error is not None or is_done

    def advance(self, candidates: Candidates) -> None:
        """Extend the beams by one token."""
        beams: list[tuple[int, Hypothesis]] = []
        extensions = self._extensions(candidates, self.generated + 1)
        for i, (parent, extended) in enumerate(extensions):
            if extended.reason in (None, "length"):
                beams.append((parent, extended))
            elif i < self.slots and not self._offer(extended):
                break
            if len(beams) == self.slots:
                break
        # Only a tiny vocabulary leaves fewer than K extensions; the other slots are then dead.
        first, tokens = self.beams[0], (*self.beams[0].tokens, self.options.end_id)
        reason: FinishReason | None = "length" if len(tokens) == self.request.output_len else None
        dead = Hypothesis(tokens, (*first.log_probs, 0.0), UNSTARTED, reason)
        self._continue_from(beams + [(0, dead)] * (self.slots - len(beams)))

    def _offer(self, hypothesis: Hypothesis) -> bool:
        """Add a hypothesis to the pool; return False if the pool is full of better ones.

        Only later candidates of the step that filled the pool can find it full.
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
