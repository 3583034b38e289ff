"""Logit processors, for all slots of a step at once, and the log probabilities of tokens.

Order: as `draws` has it. Every rule acts on one slot by elementwise arithmetic, whose result does
not depend on the other slots, bit for bit.
"""

# Shapes: N slots of a step, n of them processed here, V vocabulary, X V rounded up to ALIGNMENT

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.decoding.options import RowOptions
from inference.decoding.rows import TokenScore
from inference.decoding.tensor_fields import Array

# Rows start at vector boundaries, so a softmax adds up every row in the same order.
ALIGNMENT = 64
LOWEST = torch.finfo(torch.float32).min
# The upper bounds of the logits of the eight tokens of each byte of a mask, lowest bit first.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = torch.from_numpy(np.where(_BITS, np.inf, -np.inf).astype(np.float32))  # (256, 8)
_TEMPERATURE_EPSILON = np.float32(1e-6)


@dataclass(frozen=True)
class LogitRules:
    """Rules for the logits of one slot in this step.

    `bias` holds ids and what is added to their logits, as `join_bias` returns them. `seen` lists
    the ids that the penalties of `options` act on; an id may occur more than once. `forbidden_ids`
    are the end ids while the minimum length is not reached. `mask` has a bit for each token that
    may come next, lowest first, (X / 8,) uint8.
    """

    options: RowOptions
    bias: tuple[Array, Array] | None = None
    seen: Array | None = None
    forbidden_ids: tuple[int, ...] = ()
    mask: Array | None = None


def process_logits(
    logits: torch.Tensor, *, slots: Sequence[int], rules: Sequence[LogitRules], vocab_size: int
) -> torch.Tensor:
    """Return the processed logits (n, X) of the slots, padded with -inf; `logits` is kept."""
    x = pad_vocabulary(pick_slots(logits[:, :vocab_size], slots))
    apply_masks(x, rules)
    given = [(i, *r.bias) for i, r in enumerate(rules) if r.bias is not None]
    if given:
        rows, ids, bias = zip(*given, strict=True)
        each_row = np.repeat(rows, [len(each) for each in ids])
        places = (_to(x, each_row), _to(x, np.concatenate(ids)))
        x.index_put_(places, _to(x, np.concatenate(bias)).to(x.dtype), accumulate=True)
    apply_temperature(x, rules)
    apply_penalty(x, rules)
    # A model's own end id may lie outside its vocabulary, where it cannot come up anyway.
    pairs = [(i, token) for i, rule in enumerate(rules) for token in rule.forbidden_ids]
    if banned := [pair for pair in pairs if 0 <= pair[1] < vocab_size]:
        index = _to(x, np.asarray(banned, np.int64))  # (count, 2)
        x[index[:, 0], index[:, 1]] = LOWEST
    apply_min_p(x, rules)
    return x


def pad_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """Return a copy of `logits` (n, V) widened to (n, X) with -inf."""
    count, vocab_size = logits.shape
    x = logits.new_empty((count, -(-vocab_size // ALIGNMENT) * ALIGNMENT))
    x[:, :vocab_size] = logits
    x[:, vocab_size:] = -torch.inf
    return x


def pick_slots(logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """Return some rows of `logits` in the given order, without a copy where those are all."""
    if list(slots) == list(range(len(logits))):
        return logits
    return logits[_to(logits, np.asarray(slots, np.int64))]


def temperature_factor(temperature: float) -> float:
    """Return what sampling multiplies logits by; a row at exactly 1 is left untouched.

    FasterTransformer multiplies such a row by 0.999999 if any other row of the batch has another
    temperature; here a row depends on its own value alone.
    """
    if temperature == 1:
        return 1.0
    return float(np.float32(1) / (np.float32(temperature) + _TEMPERATURE_EPSILON))


def apply_temperature(x: torch.Tensor, rules: Sequence[LogitRules]) -> None:
    """Scale each row of `x` by its temperature: sampling multiplies, beam search divides."""
    factors, divisors = np.ones(len(rules), np.float32), np.ones(len(rules), np.float32)
    for nth, options in enumerate(rule.options for rule in rules):
        if options.beam_width == 1:
            factors[nth] = temperature_factor(options.temperature)
        elif options.temperature != 1:
            divisors[nth] = np.float32(options.temperature) + _TEMPERATURE_EPSILON
    if (factors != 1).any():
        x.mul_(_to(x, factors)[:, None])
    if (divisors != 1).any():
        x.div_(_to(x, divisors)[:, None])


def apply_penalty(x: torch.Tensor, rules: Sequence[LogitRules]) -> None:
    """Penalise every id a slot has seen, once, whatever its count."""
    where = [(i, r.seen) for i, r in enumerate(rules) if r.seen is not None and len(r.seen)]
    if not where:
        return
    sizes = [len(seen) for _, seen in where]
    which = [i for i, _ in where]
    rows = _to(x, np.repeat(np.asarray(which, np.int64), sizes))
    ids = _to(x, np.concatenate([seen for _, seen in where]).astype(np.int64))
    repetition = np.asarray([rules[i].options.repetition_penalty for i in which], np.float32)
    presence = np.asarray([rules[i].options.presence_penalty for i in which], np.float32)
    r, a = _to(x, np.repeat(repetition, sizes)), _to(x, np.repeat(presence, sizes))
    old = x[rows, ids]  # an id that occurs twice is read twice before it is written
    x[rows, ids] = torch.where(old < 0, old * r, old / r) - a


def apply_masks(x: torch.Tensor, rules: Sequence[LogitRules]) -> None:
    """Exclude the tokens that the mask of a row does not have."""
    masked = [(i, rule.mask) for i, rule in enumerate(rules) if rule.mask is not None]
    if not masked:
        return
    rows, masks = zip(*masked, strict=True)
    places = _to(x, np.stack(masks).astype(np.int32)).view(-1)
    bounds = _BOUNDS.to(x.device).index_select(0, places).view(len(rows), -1)  # (count, X or less)
    for row, bound in zip(rows, bounds, strict=True):
        x[row, : len(bound)].clamp_(max=bound)


def apply_min_p(x: torch.Tensor, rules: Sequence[LogitRules]) -> None:
    """Exclude the ids of a row that are less likely than `min_p` times its likeliest one."""
    shares = np.asarray([rule.options.min_p for rule in rules], np.float32)
    if not shares.any():
        return
    with np.errstate(divide="ignore"):
        depths = _to(x, np.log(shares))[:, None]  # minus infinity excludes nothing
    x.masked_fill_(x < x.amax(-1, keepdim=True) + depths, -torch.inf)


def _to(x: torch.Tensor, values: Array) -> torch.Tensor:
    return torch.from_numpy(values).to(x.device, non_blocking=True)


@torch.inference_mode()
def token_scores(
    logits: torch.Tensor, next_ids: Sequence[int], *, top: int, vocab_size: int
) -> list[TokenScore]:
    """Return the score of each of `next_ids` with the `top` best tokens.

    `logits` are unprocessed, (T, V) or wider. Virtual tokens, whose ids are negative or outside the
    vocabulary, score 0.
    """
    x = torch.log_softmax(pad_vocabulary(logits[:, :vocab_size]), dim=-1)  # (T, X)
    ids = torch.tensor(list(next_ids), device=x.device)
    places = ids.clamp(0, vocab_size - 1)
    own = torch.where(ids == places, x.gather(1, places[:, None])[:, 0], 0.0).tolist()
    best = x.topk(min(top, vocab_size), dim=-1)  # (T, W)
    columns = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScore(value, tuple(ids), tuple(values)) for value, ids, values in columns]
