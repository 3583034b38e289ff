"""The best tokens of each slot, ordered by descending logit and then ascending id.

The order is total: the first w candidates are the same whatever number is requested, and of equal
logits the lowest id comes first.
"""

# Shapes: n slots, X padded vocabulary, W candidates

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.decoding.tensor_fields import Array

_LOW32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Candidates:
    """Candidates of n slots on the CPU, best first.

    `log_norms` is log(sum(exp(logit - best))) over the vocabulary, None if not requested. `logits`
    are the processed logits, still on their device.
    """

    values: Array  # (n, W) fp32
    ids: Array  # (n, W)
    log_norms: Array | None  # (n,) fp32
    logits: Tensor  # (n, X)

    def rows(self, start: int, count: int) -> Candidates:
        """Return the candidates of `count` slots from `start` on."""
        part = slice(start, start + count)
        norms = None if self.log_norms is None else self.log_norms[part]
        return Candidates(self.values[part], self.ids[part], norms, self.logits[part])


def select(x: Tensor, *, width: int, with_norm: bool) -> Candidates:
    """Return the best `width` tokens of every row of `x` (n, X)."""
    values, ids = top_candidates(x, width=min(width, x.shape[1]))
    log_norms = None
    if with_norm:
        # log_softmax adds up each row separately, in an order that depends on X only.
        norms = -torch.log_softmax(x, dim=-1).gather(1, ids[:, :1])[:, 0]
        log_norms = norms.cpu().numpy()
    return Candidates(values.cpu().numpy(), ids.cpu().numpy(), log_norms, x)


def top_candidates(x: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Return values and ids, both (n, width), of the best tokens of every row of `x`.

    The best value of a row with NaN is not finite. If fewer than `width` tokens are allowed, -inf
    fills up the rest.
    """
    if x.device.type != "cpu":
        return x.max(-1, keepdim=True) if width == 1 else top_by_chunks(x, width=width)
    if width == 1:
        # numpy's arg-max is vectorised and many times faster than torch's.
        best = torch.from_numpy(x.numpy().argmax(-1))[:, None]
        return x.gather(1, best), best
    chunk = 64 if width <= 32 else 32
    maxima = x.view(len(x), -1, chunk).amax(-1).numpy()  # (n, X / chunk)
    values = np.full((len(x), width), -np.inf, np.float32)
    ids = np.zeros((len(x), width), np.int64)
    for row, best, value, found in zip(x.numpy(), maxima, values, ids, strict=True):
        _top_of_row(row.reshape(-1, chunk), best, value, found)
    return torch.from_numpy(values), torch.from_numpy(ids)


def _top_of_row(chunks: Array, maxima: Array, values: Array, ids: Array) -> None:
    """Write the best tokens of one row, given as (X / chunk, chunk), to `values` and `ids` (W,).

    If W chunks have a maximum of at least t, the best W tokens are all at least t.
    """
    count, width = len(maxima), len(values)
    if not np.isfinite(maxima.max()):
        values[0] = np.nan
        return
    threshold = np.finfo(np.float32).min  # above -inf, the logit of banned tokens
    if width < count:
        threshold = max(threshold, np.partition(maxima, count - width)[count - width])
    within = np.flatnonzero(maxima >= threshold)
    pool = chunks[within].ravel()
    indices = np.flatnonzero(pool >= threshold)  # ascending, so a stable sort keeps low ids first
    found = pool[indices]
    order = np.argsort(-found, kind="stable")[:width]
    values[: len(order)] = found[order]
    chunk = chunks.shape[1]
    indices = indices[order]
    ids[: len(order)] = within[indices // chunk] * chunk + indices % chunk


def top_by_chunks(x: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Return the result of `top_candidates`, with static shapes and without a synchronisation."""
    chunk = 64 if width <= 16 else 16
    if 2 * width * chunk > x.shape[1]:
        return _top_by_key(x, torch.arange(x.shape[1], device=x.device), width)
    # The best tokens lie in the chunks with the best maxima: a chunk that precedes another has a
    # token that precedes all tokens of the other.
    maxima = x.view(len(x), -1, chunk).amax(-1)  # (n, X / chunk)
    if short := -maxima.shape[1] % 64:
        maxima = torch.nn.functional.pad(maxima, (0, short), value=-torch.inf)
    _, chunks = top_by_chunks(maxima, width=width)
    inside = torch.arange(chunk, device=x.device)
    ids = (chunks[:, :, None] * chunk + inside).flatten(1)  # (n, width * chunk)
    return _top_by_key(x.gather(1, ids), ids, width)


def _top_by_key(values: Tensor, ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Sort by 64-bit keys: high half the logit as an ordered integer, low half the inverted id."""
    # NaN sorts first, which marks the row as unusable; -0.0 equals 0.0.
    values = torch.nan_to_num(values + 0.0, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    keys = (_flip(values.view(torch.int32)).long() << 32) + (_LOW32 - ids)
    best = keys.topk(width, dim=-1).values
    found = _flip((best >> 32).int()).view(torch.float32)
    return found, _LOW32 - (best & _LOW32)


def _flip(bits: Tensor) -> Tensor:
    """Map float bits to integers of the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
