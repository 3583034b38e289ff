"""The rules of decoding, written plainly on whole logits: an oracle for answers of the engine.

Nothing of the engine is used. Logits come from `transformers`, for a whole sequence at a time.
Sources: FasterTransformer 5.3 for the order of the rules; OpenAI's API reference for the frequency
penalty and the bias of logits; Marsaglia, "Xorshift RNGs", 2003, and cuRAND's seeding for the
random numbers.
"""

# Shapes: T tokens, V vocabulary

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# Between two computations in fp32 of the same logarithm of a probability.
CLOSE = 5e-4
_EPSILON = 1e-6


@dataclass
class Rules:
    """The options of a row, by the names of the request."""

    output_len: int
    end_id: int
    beam_width: int = 1
    runtime_top_k: int = 0
    runtime_top_p: float = 0.0
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_length: int = 0
    len_penalty: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    random_seed: int = 0
    bad_words: list[list[int]] = field(default_factory=list)
    stop_words: list[list[int]] = field(default_factory=list)
    virtual: int = 0  # cached tokens before the context

    @property
    def top_k(self) -> int:
        return 1 if not self.runtime_top_k and not self.runtime_top_p else self.runtime_top_k

    @property
    def top_p(self) -> float:
        return float(np.float32(self.runtime_top_p)) or 1.0


def log_softmax(logits: Array) -> Array:
    """Return the logarithms of probabilities along the last axis, fp64."""
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def uniforms(seed: int) -> Iterator[float]:
    """Yield what cuRAND's XORWOW draws for `curand_init(seed, 0, 0)`, in (0, 1]."""
    mask = 2**32 - 1
    low = ((seed & mask) ^ 0xAAD26B49) * 1099087573 & mask
    high = ((seed >> 32) ^ 0xF7DCEFDD) * 2591861531 & mask
    d = 6615241 + low + high & mask
    v = [123456789 + low, 362436069 ^ low, 521288629 + high, 88675123 ^ high, 5783321 + low]
    v = [word & mask for word in v]
    while True:
        t = v[0] ^ (v[0] >> 2)
        new = (v[4] ^ (v[4] << 4)) ^ (t ^ (t << 1))
        v = [*v[1:], new & mask]
        d = d + 362437 & mask
        yield float(np.float32(v[4] + d & mask) * np.float64(2.0**-32) + 2.0**-33)


def processed(
    logits: Array, context: Sequence[int], answer: Sequence[int], rules: Rules, *, divide: bool
) -> Array:
    """Return the logits (V,) that the next token after context and answer is chosen from."""
    x = logits.astype(np.float64)
    history = [*context, *answer]
    for *before, last in rules.bad_words:
        if last and history[len(history) - len(before) :] == before:
            x[last] = -np.inf
    for token, bias in rules.logit_bias.items():
        x[token] += bias
    for token in answer:
        x[token] -= rules.frequency_penalty
    if rules.temperature != 1:
        t = rules.temperature + _EPSILON
        x = x / t if divide else x * (1 / t)
    if rules.virtual + len(history) > 1:
        seen = sorted(token for token in set(history) if token < len(x))
        old = x[seen]
        factor = rules.repetition_penalty
        x[seen] = np.where(old < 0, old * factor, old / factor) - rules.presence_penalty
    if len(answer) < rules.min_length:
        x[rules.end_id] = np.finfo(np.float32).min
    return x


def ended(history: Sequence[int], answer_len: int, rules: Rules) -> str | None:
    """Return why a row ends after its newest token, None if it continues."""
    if history[-1] == rules.end_id:
        return "end"
    if any(list(history[-len(word) :]) == word for word in rules.stop_words):
        return "stop"
    return "length" if answer_len == rules.output_len else None


@dataclass
class Scores:
    """The scores of a row's answer."""

    cum: float = 0.0
    each: list[float] = field(default_factory=list)


def check_sampled(
    answer: Sequence[int], logits: Array, context: Sequence[int], rules: Rules
) -> Scores:
    """Check that an answer follows the rules, token by token, and return its scores.

    Args:
        answer: The row's tokens.
        logits: (T, V) from which each of them was chosen, before any rule.
        context: What precedes the answer.
        rules: The row's.
    """
    assert len(logits) == len(answer) > 0
    random, top_p = uniforms(rules.random_seed), rules.top_p
    scores = Scores()
    for n, token in enumerate(answer):
        x = processed(logits[n], context, answer[:n], rules, divide=False)
        masses = np.exp(x - x.max())
        order = np.lexsort((np.arange(len(x)), -x))
        norm = masses.sum() + _EPSILON
        log_prob = float(x[token] - x.max() - math.log(norm))
        kept = norm
        if rules.top_k == 1:
            assert x[token] > x.max() - CLOSE, (n, "not the best")
            kept = 1.0
        else:
            if rules.top_k:
                order = order[: rules.top_k]
                kept = masses[order].sum()
            threshold = next(random) * top_p * kept
            place = np.flatnonzero(order == token)
            slack = CLOSE * masses.sum()
            if not len(place):  # only a tie can have let it in
                assert masses[token] > masses[order[-1]] * (1 - CLOSE), (n, "not a candidate")
            else:
                upto = masses[order[: place[0] + 1]].sum()
                assert upto - masses[token] - slack <= threshold <= upto + slack, (n, "not drawn")
            if not rules.top_k:
                top_p = max(
                    float(np.float32(top_p) * np.float32(rules.top_p_decay)), rules.top_p_min
                )
        scores.cum += log_prob
        depth = float(x[token] - x.max())
        scores.each.append(depth - math.log(kept) if rules.top_k else log_prob)
        reason = ended([*context, *answer[: n + 1]], n + 1, rules)
        assert (reason is not None) == (n + 1 == len(answer)), (n, reason)
    return scores


@dataclass
class Beam:
    """A hypothesis of a beam search."""

    tokens: list[int]
    cum: float
    each: list[float]
    reason: str | None = None


class TooCloseError(Exception):
    """Two hypotheses score almost the same: rounding decides."""


def search(
    next_logits: Callable[[list[list[int]]], Array],
    context: Sequence[int],
    rules: Rules,
    *,
    pooled: bool,
) -> list[Beam]:
    """Return the beams of a search, best first.

    Args:
        next_logits: (beams, V) after each of some answers of equal length.
        context: What precedes the answers.
        rules: The row's.
        pooled: Finished hypotheses wait in a pool, as with encoder-decoders.

    Raises:
        TooCloseError: The order depends on less than the tolerance.
    """
    width = rules.beam_width
    beams, pool = [Beam([], 0.0, [])], list[Beam]()
    for _ in range(rules.output_len):
        found = _extended(beams, next_logits, context, rules)
        _refuse_ties([beam.cum for beam in found[: 2 * width + 1]])
        beams = _go_on(found, pool, rules) if pooled else found[:width]
        if len(pool) == width or all(beam.reason for beam in beams):
            break
    if not pooled:
        return beams
    every = pool + ([] if len(pool) == width else beams)
    every.sort(key=lambda beam: -_ranked(beam, rules))
    _refuse_ties([_ranked(beam, rules) for beam in every])
    return every[:width]


def _extended(
    beams: Sequence[Beam],
    next_logits: Callable[[list[list[int]]], Array],
    context: Sequence[int],
    rules: Rules,
) -> list[Beam]:
    """Return the best extensions of beams, best first; a finished beam is its own."""
    found = [beam for beam in beams if beam.reason]
    running = [beam for beam in beams if not beam.reason]
    for beam, logits in zip(running, next_logits([b.tokens for b in running]), strict=True):
        x = processed(logits, context, beam.tokens, rules, divide=True)
        scores = log_softmax(np.maximum(x, np.finfo(np.float32).min))
        for token in np.argsort(-scores, kind="stable")[: 2 * rules.beam_width]:
            tokens, value = [*beam.tokens, int(token)], float(scores[token])
            reason = ended([*context, *tokens], len(tokens), rules)
            found.append(Beam(tokens, beam.cum + value, [*beam.each, value], reason))
    return sorted(found, key=lambda beam: -beam.cum)


def _go_on(found: Sequence[Beam], pool: list[Beam], rules: Rules) -> list[Beam]:
    """Move what ends among the best to the pool; return the beams that continue."""
    beams = []
    for nth, beam in enumerate(found):
        if beam.reason not in ("end", "stop"):
            beams.append(beam)
        elif nth < rules.beam_width:
            if len(pool) == rules.beam_width:
                worst = min(pool, key=lambda beam: _ranked(beam, rules))
                if _ranked(beam, rules) < _ranked(worst, rules):
                    break
                pool.remove(worst)
            pool.append(beam)
        if len(beams) == rules.beam_width:
            break
    return beams


def _refuse_ties(scores: Sequence[float]) -> None:
    if any(a - b < CLOSE for a, b in itertools.pairwise(scores)):
        raise TooCloseError


def _ranked(beam: Beam, rules: Rules) -> float:
    return beam.cum / len(beam.tokens) ** rules.len_penalty
