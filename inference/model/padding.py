"""The rule for sequences of unequal length that share one attention call, padded."""

from __future__ import annotations

from collections.abc import Sequence

# The padded work stays below this multiple of the true work, or it adds fewer tokens than a
# further call costs.
_FACTOR = 1.25
_CALL_TOKENS = 256


def may_share_call(lengths: Sequence[int]) -> bool:
    """Return whether sequences of these lengths are padded to the longest, for one call."""
    padded, true = max(lengths) * len(lengths), sum(lengths)
    return padded - true <= _CALL_TOKENS or padded <= _FACTOR * true
