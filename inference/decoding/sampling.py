"""Sampled answers, which grow by one token per step: greedy, top-k and nucleus sampling.

Source: FasterTransformer 5.3, kernels/sampling_topk_kernels.cu and sampling_topp_kernels.cu. The
token at the nucleus boundary keeps only the part of its mass that lies inside the nucleus.
"""

# Shapes: n rows, W candidates, V vocabulary (padded)

import math
from array import array
from collections.abc import Sequence

import numpy as np

from inference.decoding.answer import GrowingAnswer
from inference.decoding.candidates import Candidates
from inference.decoding.draws import ARG_MAX, DrawParameters, TokenMarks, Xorwow
from inference.decoding.processors import LogitRules, temperature_factor
from inference.decoding.rows import FinishReason, SequenceRequest, SequenceResult, TokenScore
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import ends_with

# A probability is exp(l - max) / (sum + MASS_EPSILON).
MASS_EPSILON = 1e-6
# Number of best tokens that a nucleus row considers before it takes the whole row.
NUCLEUS_PREFIX = {"cpu": 128, "cuda": 1024}


class SampledAnswer(GrowingAnswer):
    """A sampled answer: its tokens, its random generator and its nucleus size."""

    running = (0,)

    def __init__(
        self,
        request: SequenceRequest,
        *,
        vocab_size: int,
        full_log_probs: bool,
        include_boundary: bool,
    ) -> None:
        super().__init__(request, vocab_size=vocab_size)
        o = self.options
        self.reason: FinishReason | None = None
        self.cum_log_prob = 0.0
        self.scores: list[TokenScore] = []
        self.generator = Xorwow(o.random_seed)
        self.top_p = o.top_p
        self._include_boundary = include_boundary if o.whole_boundary is None else o.whole_boundary
        self._full_log_probs = full_log_probs
        self._log_probs: list[float] = []
        self._constraint = request.constraint
        self._history = array("q", request.context_ids)
        self._full_len = len(self._history) + request.output_len
        is_scored = o.return_log_probs or o.num_log_probs
        is_free = self._constraint is None
        self._is_nucleus = not o.is_greedy and o.top_k == 0
        self.needs_norm = self._is_nucleus or o.return_log_probs
        # Whether a step takes the arg-max of the raw logits, apart from a forbidden id.
        self._is_plain = o.is_greedy and is_free and not (o.has_marks or is_scored)
        self._factor = 1.0 if self._is_plain else temperature_factor(o.temperature)
        nucleus_stays = o.top_p_decay == 1 and o.top_p_min <= o.top_p
        self._nucleus_changes = self._is_nucleus and not nucleus_stays
        # A rank can forbid one token of a row, and supports neither min_p nor grammars.
        is_simple = is_free and not o.min_p and (not o.min_length or len(o.end_ids) <= 1)
        self.rank_chooses = (
            not is_scored
            and is_simple
            and not self._nucleus_changes
            and all(len(word) == 1 for word in o.bad_words)
        )

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self._history) - len(self.request.context_ids)

    def generated_from(self, first: int) -> list[int]:
        """Return the generated tokens from index `first` on."""
        return self._history[len(self.request.context_ids) + first :].tolist()

    @property
    def is_finished(self) -> bool:
        """True when the answer needs no more steps."""
        return self.reason is not None or self.error is not None

    @property
    def is_plain(self) -> bool:
        """True when this step takes the arg-max of the raw logits."""
        return self._is_plain and not self.forbidden_ids(self.generated)

    def width(self, device: str) -> int:
        """Return how many of the best tokens a step considers."""
        if self.options.is_greedy:
            return 1
        return NUCLEUS_PREFIX.get(device, 1024) if self._is_nucleus else self.options.top_k

    def rules(self) -> list[LogitRules]:
        """Return the rules for the answer's logits in this step."""
        rules = LogitRules(
            self._factor,
            penalty=self.penalty(self.generated),
            marks=self.marks(),
            forbidden_ids=self.forbidden_ids(self.generated),
            min_p=self.options.min_p,
            mask=None if self._constraint is None else self._constraint.mask(),
        )
        return [rules]

    def marks(self) -> TokenMarks:
        """Return the ids with a penalty or a bias in the next step."""
        return self._marks(self._history[len(self.request.context_ids) :], self._history)

    def draw(self) -> DrawParameters:
        """Return the draw of the next step; call it once per step, as it advances the generator."""
        o = self.options
        if self._is_plain:
            return ARG_MAX
        if o.is_greedy:
            return ARG_MAX._replace(factor=self._factor)
        rest = MASS_EPSILON if self._is_nucleus else 0.0
        uniform = self.generator.uniform()
        return DrawParameters(
            self._factor, o.top_k, self.top_p, rest, self._include_boundary, uniform
        )

    def add_log_prob(self, log_prob: float, renormalized: float) -> None:
        """Add the next token's log probability, and the one renormalized over its candidates."""
        self.cum_log_prob += log_prob
        self._log_probs.append(log_prob if self._full_log_probs else renormalized)

    def append(self, token: int) -> None:
        """Append a token, which may end the answer."""
        history, o = self._history, self.options
        history.append(token)
        self.tokens = (token,)
        if self._nucleus_changes:
            decayed = float(np.float32(self.top_p) * np.float32(o.top_p_decay))
            self.top_p = o.top_p if token == o.top_p_reset_id else max(decayed, o.top_p_min)
        if token in o.end_ids:
            self.reason = "end"
        elif o.stop_words and ends_with(history, o.stop_words):
            self.reason = "stop"
        elif len(history) == self._full_len:
            self.reason = "length"
        elif self._constraint is not None:
            self.reason = "stop" if self._constraint.take(token) else None

    def result(self) -> SequenceResult:
        """Return the answer so far."""
        return SequenceResult(
            output_ids=(tuple(self.generated_from(0)),),
            cum_log_probs=(self.prompt.log_prob + self.cum_log_prob,),
            output_log_probs=(tuple(self._log_probs),) if self.options.return_log_probs else (),
            finish_reasons=(self.reason,),
            scores=tuple(self.scores),
            prompt=self.prompt,
        )


def sample(answers: Sequence[SampledAnswer], candidates: Candidates) -> None:
    """Draw the next token of each answer from its candidates."""
    values, norms, count = candidates.values, candidates.log_norms, len(answers)
    best = values[:, 0].tolist()
    draws: list[DrawParameters] = []
    indices, is_certain, log_mass = [0] * count, [True] * count, [0.0] * count
    if values.shape[1] > 1:
        draws = [answer.draw() for answer in answers]
        indices, is_certain, log_mass = _draw(values, norms, draws)
    for i, answer in enumerate(answers):
        if not math.isfinite(best[i]):
            answer.fail()
            continue
        token, value = int(candidates.ids[i, indices[i]]), float(values[i, indices[i]])
        if not is_certain[i]:
            token, value = _draw_from_all(candidates, i, draws[i])
        if answer.options.return_log_probs:
            assert norms is not None
            depth = value - best[i]
            log_prob = depth - math.log(math.exp(norms[i]) + MASS_EPSILON)
            answer.add_log_prob(log_prob, depth - log_mass[i])
        answer.append(token)


def _draw(
    values: Array, log_norms: Array | None, draws: Sequence[DrawParameters]
) -> tuple[list[int], list[bool], list[float]]:
    """Draw an index of each row of descending logits (n, W).

    Returns the indices; whether each is certain, that is, does not need more than W logits; and the
    logarithm of the mass that can be drawn before the nucleus is cut.
    """
    _, top_k, top_p, rest, whole, uniform = np.array(draws).T[:, :, None]  # (n, 1) each
    logits = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # an unusable row becomes NaN
        masses = np.exp(logits - logits[:, :1])
        norms = 0.0 if log_norms is None else np.exp(log_norms.astype(np.float64))[:, None]
    if top_k.any():
        masses[(top_k > 0) & (np.arange(values.shape[1]) >= top_k)] = 0.0
    sums = np.cumsum(masses, axis=1)
    within = sums[:, -1:]
    mass = np.where(top_k > 0, within, norms) + rest
    inside = top_p * mass
    is_certain = (whole == 0) | (within >= inside)
    if whole.any():
        edge = np.take_along_axis(sums, _crossing(sums, inside), 1)
        inside = np.where(whole > 0, edge, inside)
    inside *= uniform
    is_certain &= within >= inside
    indices = _crossing(sums, inside)
    return indices[:, 0].tolist(), is_certain[:, 0].tolist(), np.log(mass[:, 0]).tolist()


def _crossing(sums: Array, mass: Array) -> Array:
    """Return the index (n, 1) at which sums (n, W) reach `mass` (n, 1), or their last value."""
    index: Array = np.sum(sums < np.minimum(mass, sums[:, -1:]), axis=1, keepdims=True)
    return index


def _draw_from_all(candidates: Candidates, i: int, draw: DrawParameters) -> tuple[int, float]:
    """Draw from a row whose nucleus extends beyond its candidates; return token and logit."""
    assert candidates.log_norms is not None
    logits = candidates.logits[i].cpu().numpy()  # (X,)
    ordered = np.sort(logits)[::-1]
    for width in (len(ordered) // 4, len(ordered)):  # a quarter often suffices
        best, norms = ordered[None, :width], candidates.log_norms[i : i + 1]
        (index,), (is_certain,), _ = _draw(best, norms, [draw])
        if is_certain:
            break
    value = ordered[index]
    equal = index - np.count_nonzero(logits > value)  # among equal logits, lower ids come first
    return int(np.flatnonzero(logits == value)[equal]), float(value)
