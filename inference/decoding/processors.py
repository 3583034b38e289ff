"""Logit processors, for all slots of a step at once, and the log probabilities of tokens.

They run in the order that `draws` defines. Every rule is elementwise arithmetic on one slot, whose
bits do not depend on the other slots.
"""

# Shapes: N slots of a step, n of them processed here, V vocabulary, X V rounded up to ALIGNMENT

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.decoding.draws import NO_MARKS, UNMARKED, Penalty, TokenMarks
from inference.decoding.rows import TokenScore
from inference.decoding.tensor_fields import Array
from inference.decoding.word_lists import TokenIds

# Rows start at vector boundaries, so that a softmax adds up every row in the same order.
ALIGNMENT = 64
LOWEST = torch.finfo(torch.float32).min
_TEMPERATURE_EPSILON = np.float32(1e-6)


class LogitRules(NamedTuple):
    """Rules for the logits of one slot in this step, as defined in `draws`.

    Beam search uses `divisor` in place of `factor`. `forbidden_ids` are the end ids until the
    minimum length is reached. `mask` has a bit for each token that may come next, lowest bit first,
    (X / 8,) uint8.
    """

    factor: float = 1.0
    divisor: float = 1.0
    penalty: Penalty = UNMARKED
    marks: TokenMarks = NO_MARKS
    forbidden_ids: TokenIds = ()
    min_p: float = 0.0
    mask: Array | None = None


def process_logits(
    logits: Tensor, *, slots: Sequence[int], rules: Sequence[LogitRules], vocab_size: int
) -> Tensor:
    """Return the processed logits (n, X) of the slots, padded with -inf; `logits` is unchanged."""
    x = pad_vocabulary(pick_slots(logits[:, :vocab_size], slots))
    _apply_masks(x, rules)
    if biased := _indices(x, [rule.marks.ids for rule in rules]):
        bias = np.concatenate([rule.marks.bias for rule in rules])
        x.index_put_(biased, _to(x, bias).to(x.dtype), accumulate=True)
    if (factors := _column(x, [rule.factor for rule in rules])) is not None:
        x.mul_(factors)
    if (divisors := _column(x, [rule.divisor for rule in rules])) is not None:
        x.div_(divisors)
    _apply_penalty(x, rules)
    if forbidden := _indices(x, [rule.forbidden_ids for rule in rules]):
        x[forbidden] = LOWEST
    _apply_min_p(x, rules)
    return x


def _column(x: Tensor, values: Sequence[float]) -> Tensor | None:
    """Return `values` as a column (n, 1) fp32 on the device of `x`, None if all are 1."""
    if all(value == 1 for value in values):
        return None
    return _to(x, np.array(values, np.float32))[:, None]


def _indices(x: Tensor, ids: Sequence[Sequence[int] | Array]) -> tuple[Tensor, Tensor] | None:
    """Return row and column indices of each row's `ids` in `x`, None if there are no ids."""
    sizes = [len(row_ids) for row_ids in ids]
    if not any(sizes):
        return None
    indices = np.repeat(np.arange(len(sizes)), sizes), np.concatenate(ids).astype(np.int64)
    return _to(x, indices[0]), _to(x, indices[1])


def pad_vocabulary(logits: Tensor) -> Tensor:
    """Return a copy of `logits` (n, V) widened to (n, X) with -inf."""
    count, vocab_size = logits.shape
    x = logits.new_empty((count, -(-vocab_size // ALIGNMENT) * ALIGNMENT))
    x[:, :vocab_size] = logits
    x[:, vocab_size:] = -torch.inf
    return x


def pick_slots(logits: Tensor, slots: Sequence[int]) -> Tensor:
    """Return the rows `slots` of `logits`, without a copy if these are all rows in order."""
    if list(slots) == list(range(len(logits))):
        return logits
    return logits[_to(logits, np.asarray(slots, np.int64))]


def temperature_factor(temperature: float) -> float:
    """Return the factor by which sampling multiplies logits, exactly 1 for a temperature of 1.

    FasterTransformer multiplies by 0.999999 instead if another row of the batch has a different
    temperature; here a row depends on its own temperature only.
    """
    if temperature == 1:
        return 1.0
    return float(np.float32(1) / np.float32(temperature_divisor(temperature)))


def temperature_divisor(temperature: float) -> float:
    """Return the divisor that beam search applies to logits, exactly 1 for a temperature of 1."""
    return 1.0 if temperature == 1 else float(np.float32(temperature) + _TEMPERATURE_EPSILON)


def _apply_penalty(x: Tensor, rules: Sequence[LogitRules]) -> None:
    """Penalise every id that a slot has seen, once, no matter how often it occurred."""
    ids = [rule.marks.seen for rule in rules]
    if (seen := _indices(x, ids)) is None:
        return
    sizes = [len(row_ids) for row_ids in ids]
    penalties = np.array([rule.penalty for rule in rules], np.float32)
    r, a = (_to(x, np.repeat(penalties[:, nth], sizes)) for nth in (0, 1))
    old = x[seen]  # all values are read first, so repeated ids are penalised once
    x[seen] = torch.where(old < 0, old * r, old / r) - a


def _apply_masks(x: Tensor, rules: Sequence[LogitRules]) -> None:
    """Exclude the tokens that are not in the mask of a row."""
    for row, rule in zip(x, rules, strict=True):
        if rule.mask is not None:
            excluded = np.unpackbits(~rule.mask, bitorder="little").view(np.bool_)  # (X or less,)
            row[: len(excluded)].masked_fill_(_to(x, excluded), -torch.inf)


def _apply_min_p(x: Tensor, rules: Sequence[LogitRules]) -> None:
    """Exclude the ids that are less likely than `min_p` times the likeliest id of the row."""
    shares = np.asarray([rule.min_p for rule in rules], np.float32)
    if not shares.any():
        return
    with np.errstate(divide="ignore"):
        depths = _to(x, np.log(shares))[:, None]  # -inf excludes nothing
    x.masked_fill_(x < x.amax(-1, keepdim=True) + depths, -torch.inf)


def _to(x: Tensor, values: Array) -> Tensor:
    return torch.from_numpy(values).to(x.device, non_blocking=True)


@torch.inference_mode()
def token_scores(
    logits: Tensor, next_ids: Sequence[int], *, top: int, vocab_size: int
) -> list[TokenScore]:
    """Return the score of each of `next_ids`, with the `top` best tokens at its position.

    `logits` are unprocessed, (T, V) or wider. Virtual tokens, whose ids are negative or outside the
    vocabulary, score 0.
    """
    x = torch.log_softmax(pad_vocabulary(logits[:, :vocab_size]), dim=-1)  # (T, X)
    ids = torch.tensor(list(next_ids), device=x.device)
    clamped = ids.clamp(0, vocab_size - 1)
    own = torch.where(ids == clamped, x.gather(1, clamped[:, None])[:, 0], 0.0).tolist()
    best = x.topk(min(top, vocab_size), dim=-1)  # (T, W)
    columns = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScore(value, tuple(ids), tuple(values)) for value, ids, values in columns]
