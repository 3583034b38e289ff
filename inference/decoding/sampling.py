"""Rows that grow by one token per step: greedy, top-k, and nucleus sampling.

Source: FasterTransformer 5.3, kernels/sampling_topk_kernels.cu and sampling_topp_kernels.cu. A
token at the nucleus boundary keeps only the part of its mass inside the nucleus.
"""

# Shapes: n rows, W candidates, V vocabulary (padded)

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference.decoding.candidates import Candidates, GroupKey, top_candidates
from inference.decoding.draws import (
    ARG_MAX,
    DrawParameters,
    Penalty,
    RowBias,
    TokenMarks,
    Xorwow,
    join_bias,
    prompt_ids,
)
from inference.decoding.processors import LOWEST, LogitRules, temperature_factor
from inference.decoding.rows import FinishReason, PromptResult, RowRequest, RowResult, TokenScore
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import banned_ids, ends_with

# A probability is exp(l - max) / (sum + this).
MASS_EPSILON = 1e-6
# Best tokens that a nucleus row looks at before it considers the whole row.
NUCLEUS_PREFIX = {"cpu": 128, "cuda": 1024}
# Logits this far below the best differ by a factor exp(-64): beyond, the order is a formality.
_BUCKETS = 4096
_BUCKETS_PER_UNIT = 64


@dataclass(frozen=True)
class Choice:
    """A drawn token, its log probability and the one renormalised over the candidates."""

    token: int
    log_prob: float = 0.0
    renormalized: float = 0.0


_PLAIN = GroupKey("plain", 1, False)


class SamplingRow:
    """One sampled row: its tokens, its generator and its nucleus size."""

    slots = 1
    running = (0,)

    def __init__(
        self, request: RowRequest, *, vocab_size: int, full_log_probs: bool, include_boundary: bool
    ) -> None:
        self.request = request
        self.options = o = request.options
        self.reason: FinishReason | None = None
        self.cum_log_prob = 0.0
        self._vocab_size = vocab_size
        self._full_log_probs = full_log_probs
        stated = o.whole_boundary
        self.include_boundary = include_boundary if stated is None else stated
        self._end_ids = o.end_ids
        self._constraint = request.constraint
        self._history = array("q", request.context_ids)
        self._full_len = len(self._history) + request.output_len
        self._log_probs: list[float] = []
        self.scores: list[TokenScore] = []
        self.prompt = PromptResult()
        self.generator = Xorwow(o.random_seed)
        self.uniform = 1.0  # of this step
        self.top_p = o.top_p
        self._prompt_ids = prompt_ids(request.context_ids if o.is_penalised else (), vocab_size)
        self._bias = RowBias(o, request.output_len) if o.is_biased else None
        is_scored = o.return_log_probs or o.num_log_probs
        # Whether a step takes the arg-max of the raw logits, the forbidden id aside.
        is_free = self._constraint is None
        self.is_plain = o.is_greedy and is_free and not (o.has_marks or is_scored)
        nucleus_stays = o.top_p_decay == 1 and o.top_p_min <= o.top_p
        # A rank forbids one token of a row, and knows neither min_p nor grammars.
        is_simple = is_free and not o.min_p and (not o.min_length or len(self._end_ids) <= 1)
        self.rank_chooses = (
            not is_scored
            and is_simple
            and (nucleus_stays or not self.is_nucleus)
            and all(len(word) == 1 for word in o.bad_words)
        )

    @property
    def generated(self) -> int:
        """Number of tokens of the row."""
        return len(self._history) - len(self.request.context_ids)

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """The end ids of the vocabulary while the row is too short to end."""
        if self.generated >= self.options.min_length:
            return ()
        return tuple(token for token in self._end_ids if 0 <= token < self._vocab_size)

    @property
    def generated_ids(self) -> list[int]:
        """The tokens that the row has."""
        return self._history[len(self.request.context_ids) :].tolist()

    @property
    def is_nucleus(self) -> bool:
        """True when the whole vocabulary, not a number of candidates, bounds the draw."""
        return not self.options.is_greedy and self.options.top_k == 0

    @property
    def is_finished(self) -> bool:
        """True when the row takes no more steps."""
        return self.reason is not None

    def group_key(self, device: str) -> GroupKey:
        """Return what this step's selection needs; widths are rounded so that rows share it."""
        if self.is_plain:
            return _PLAIN
        scored = self.options.return_log_probs
        if self.options.is_greedy:
            return GroupKey("greedy", 1, scored)
        if self.is_nucleus:
            return GroupKey("nucleus", NUCLEUS_PREFIX.get(device, 1024), True)
        return GroupKey("top_k", 1 << (self.options.top_k - 1).bit_length(), scored)

    def rules(self) -> list[LogitRules]:
        """Return what to do to the row's logits in this step."""
        seen = self._seen() if self._penalises(self.generated) else None
        bias = self._biases(self._history)
        mask = None if self._constraint is None else self._constraint.mask()
        return [LogitRules(self.options, bias, seen, self.forbidden_ids, mask)]

    def draw(self) -> DrawParameters:
        """Return the draw of the next step, which a rank makes; each step has one."""
        o = self.options
        factor = temperature_factor(o.temperature)
        if o.is_greedy:
            return ARG_MAX._replace(factor=factor) if o.has_marks else ARG_MAX
        self.uniform = self.generator.uniform()
        rest = MASS_EPSILON if self.is_nucleus else 0.0
        return DrawParameters(
            factor, o.top_k, self.top_p, rest, self.include_boundary, self.uniform
        )

    def penalty(self, produced: int) -> Penalty:
        """Return the penalty of the next draw; `produced` tokens of the row precede it."""
        o = self.options
        if not self._penalises(produced):
            return Penalty(1, 0, o.frequency_penalty)
        return Penalty(o.repetition_penalty, o.presence_penalty, o.frequency_penalty)

    def _penalises(self, produced: int) -> bool:
        # A lone first token has nothing before it: FasterTransformer starts at the second step.
        return self.options.is_penalised and self.request.context_len + produced > 1

    def _seen(self) -> Array:
        answer = self._history[len(self.request.context_ids) :]
        return np.concatenate([self._prompt_ids, np.array(answer, np.int64)])

    def marks(self) -> TokenMarks:
        """Return what a rank must know of single ids before it chooses the row's next token."""
        seen = self._seen() if self.options.is_penalised else np.empty(0, np.int64)
        return TokenMarks(
            seen, *(self._biases(()) or (np.empty(0, np.int64), np.empty(0, np.float32)))
        )

    def _biases(self, history: Sequence[int]) -> tuple[Array, Array] | None:
        own = () if self._bias is None else (self._bias.arrays(),)
        banned = banned_ids(history, self.options.bad_words, self._vocab_size)
        return join_bias(*own, banned=banned)

    def commit(self, choice: Choice) -> None:
        """Append a token and decide whether the row ends."""
        token, o = choice.token, self.options
        if o.return_log_probs:
            self.cum_log_prob += choice.log_prob
            self._log_probs.append(choice.log_prob if self._full_log_probs else choice.renormalized)
        if self.is_nucleus:
            decayed = float(np.float32(self.top_p) * np.float32(o.top_p_decay))
            self.top_p = o.top_p if token == o.top_p_reset_id else max(decayed, o.top_p_min)
        self.append(token)

    def append(self, token: int) -> bool:
        """Append a token; return whether the row ends."""
        history, o = self._history, self.options
        history.append(token)
        if self._bias is not None:
            self._bias.append(token)
        if token in self._end_ids:
            self.reason = "end"
        elif o.stop_words and ends_with(history, o.stop_words):
            self.reason = "stop"
        elif len(history) == self._full_len:
            self.reason = "length"
        elif self._constraint is not None:
            self.reason = "stop" if self._constraint.take(token) else None
        return self.reason is not None

    def result(self) -> RowResult:
        """Return the row so far."""
        return RowResult(
            output_ids=(tuple(self.generated_ids),),
            cum_log_probs=(self.prompt.log_prob + self.cum_log_prob,),
            output_log_probs=(tuple(self._log_probs),) if self.options.return_log_probs else (),
            finish_reasons=(self.reason,),
            scores=tuple(self.scores),
            prompt=self.prompt,
        )


def choose(rows: Sequence[SamplingRow], candidates: Candidates) -> list[Choice | None]:
    """Draw a token for each row from its candidates; None where the logits are unusable.

    The rows are of one kind: all greedy, all top-k, or all nucleus.
    """
    usable = np.isfinite(candidates.values[:, 0]).tolist()
    places: list[int | None] = [0] * len(rows)
    log_kept = [0.0] * len(rows)
    if not rows[0].options.is_greedy:
        places, log_kept = _draw(rows, candidates)
    choices: list[Choice | None] = []
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        if not usable[i]:
            choices.append(None)
        elif place is None:
            choices.append(_choose_from_all(row, candidates, i))
        else:
            token, value = int(candidates.ids[i, place]), candidates.values[i, place]
            if row.is_plain and token in (forbidden := row.forbidden_ids):
                logits = candidates.logits[i].clone()
                logits[list(forbidden)] = LOWEST
                token = int(top_candidates(logits[None], width=1)[1])
            choices.append(_choice(row, candidates, i, token, float(value), log_kept[i]))
    return choices


def _draw(
    rows: Sequence[SamplingRow], candidates: Candidates
) -> tuple[list[int | None], list[float]]:
    """Return the place each row drew (None: not among its candidates) and log of what it kept."""
    values = candidates.values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # an unusable row comes out as NaN
        masses = np.exp(values - values[:, :1])  # (n, W)
    if rows[0].is_nucleus:
        assert candidates.log_norms is not None
        kept = np.asarray([_norm(v) for v in candidates.log_norms.tolist()])
    else:
        counts = np.asarray([row.options.top_k for row in rows])
        masses[np.arange(masses.shape[1]) >= counts[:, None]] = 0.0
        kept = np.cumsum(masses, axis=1)[:, -1]
    for row in rows:
        row.uniform = row.generator.uniform()
    places, decided = draw_from_prefix(
        masses,
        inside=np.asarray([row.top_p for row in rows]) * kept,
        uniforms=np.asarray([row.uniform for row in rows]),
        include_boundary=np.asarray([row.include_boundary for row in rows]),
    )
    found = [place if ok else None for place, ok in zip(places.tolist(), decided, strict=True)]
    return found, [math.log(k) if k > 0 else 0.0 for k in kept.tolist()]


def _choose_from_all(row: SamplingRow, candidates: Candidates, i: int) -> Choice:
    """Draw for a nucleus row whose nucleus reaches beyond the candidates."""
    assert candidates.log_norms is not None
    logits = candidates.logits[i].cpu().numpy()  # (X,)
    mass = row.top_p * _norm(float(candidates.log_norms[i]))
    drawn = DescendingMass(logits).draw(
        row.uniform, mass=mass, include_boundary=row.include_boundary
    )
    return _choice(row, candidates, i, drawn, float(logits[drawn]), 0.0)


def _choice(
    row: SamplingRow, candidates: Candidates, i: int, token: int, value: float, log_kept: float
) -> Choice:
    if not row.options.return_log_probs:
        return Choice(token)
    assert candidates.log_norms is not None
    depth = value - float(candidates.values[i, 0])
    log_prob = depth - math.log(_norm(float(candidates.log_norms[i])))
    return Choice(token, log_prob, log_prob if row.is_nucleus else depth - log_kept)


def _norm(log_norm: float) -> float:
    """Return what divides exp(logit - best) to give a probability."""
    return math.exp(log_norm) + MASS_EPSILON if math.isfinite(log_norm) else math.nan


class DescendingMass:
    """The masses exp(logit - best) of one whole row, in the order logit down, then id up.

    Only the bucket that holds the wanted boundary is ever sorted, so a draw costs a few passes
    over the row instead of a sort.
    """

    def __init__(self, logits: Array) -> None:
        depth = logits.max() - logits  # (V,) fp32, 0 for the best
        self._logits = logits
        self._masses = np.exp(-depth)
        shallow = np.minimum(depth, np.float32((_BUCKETS - 1) / _BUCKETS_PER_UNIT))
        self._buckets = (shallow * np.float32(_BUCKETS_PER_UNIT)).astype(np.int64)
        sums = np.bincount(self._buckets, weights=self._masses, minlength=_BUCKETS)
        self._upto = np.cumsum(sums)  # (_BUCKETS,) fp64

    def find(self, threshold: float) -> tuple[int, float]:
        """Return the first token whose running sum reaches `threshold`, and that sum.

        Where rounding keeps the sum of all below the threshold it is the last token with mass.
        """
        threshold = min(threshold, float(self._upto[-1]))
        bucket = int(np.searchsorted(self._upto, threshold))
        ids = np.flatnonzero(self._buckets == bucket)
        ids = ids[np.argsort(-self._logits[ids], kind="stable")]
        before = float(self._upto[bucket - 1]) if bucket else 0.0
        sums = before + np.cumsum(self._masses[ids], dtype=np.float64)
        place = int(np.searchsorted(sums, threshold))
        if place >= len(ids):
            place = int(np.flatnonzero(self._masses[ids])[-1])
        return int(ids[place]), float(sums[place])

    def draw(self, uniform: float, *, mass: float, include_boundary: bool) -> int:
        """Draw a token from the prefix that holds `mass`; `uniform` is in (0, 1].

        The token at the boundary keeps only the part of its mass inside, or with
        `include_boundary` all of it.
        """
        if include_boundary:
            mass = self.find(mass)[1]
        return self.find(uniform * mass)[0]


def draw_from_prefix(
    masses: Array, *, inside: Array, uniforms: Array, include_boundary: Array
) -> tuple[Array, Array]:
    """Draw one candidate per row from descending `masses` (n, W) that add up to `inside` (n,).

    Where `include_boundary` (n,) says so, the last of them counts whole. Returns the places (n,)
    and whether each was decided: a row that needs candidates beyond the W at hand is not.
    """
    sums = np.cumsum(masses, axis=1)  # (n, W)
    within = sums[:, -1]
    decided = np.ones(len(masses), np.bool_)
    if include_boundary.any():
        decided = ~include_boundary | (within >= inside)
        last = np.minimum((sums < inside[:, None]).sum(1), masses.shape[1] - 1)
        whole = np.take_along_axis(sums, last[:, None], 1)[:, 0]
        inside = np.where(include_boundary, whole, inside)
    thresholds = uniforms * inside
    decided &= within >= thresholds
    places = (sums < thresholds[:, None]).sum(1)  # (n,)
    return np.minimum(places, masses.shape[1] - 1), decided
