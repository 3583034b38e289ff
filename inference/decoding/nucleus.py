"""Finding where a running sum over descending masses crosses a threshold."""

# Shapes: V vocabulary (padded), n rows, W candidates

from __future__ import annotations

import numpy as np

from inference.decoding.tensor_fields import Array

# Logits this far below the best differ by a factor exp(-64): beyond, the order is a formality.
_BUCKETS = 4096
_BUCKETS_PER_UNIT = 64


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
    masses: Array, *, inside: Array, uniforms: Array, include_boundary: bool
) -> tuple[Array, Array]:
    """Draw one candidate per row from descending `masses` (n, W) that add up to `inside` (n,).

    Returns the places (n,) and whether each was decided: a row that needs candidates beyond the W
    at hand is not.
    """
    sums = np.cumsum(masses, axis=1)  # (n, W)
    within = sums[:, -1]
    decided = np.ones(len(masses), np.bool_)
    if include_boundary:
        decided = within >= inside
        last = np.minimum((sums < inside[:, None]).sum(1), masses.shape[1] - 1)
        inside = np.take_along_axis(sums, last[:, None], 1)[:, 0]
    thresholds = uniforms * inside
    decided &= within >= thresholds
    places = (sums < thresholds[:, None]).sum(1)  # (n,)
    return np.minimum(places, masses.shape[1] - 1), decided
