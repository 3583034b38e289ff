"""The XORWOW generator of a row, bit for bit that of cuRAND with sequence 0 and offset 0.

Source: G. Marsaglia, "Xorshift RNGs", 2003, section 3.1, with the seeding of NVIDIA's
`curand_kernel.h`, which FasterTransformer calls as `curand_init(seed, 0, 0, state)`.
"""

from __future__ import annotations

import numpy as np

_MASK = 0xFFFFFFFF


class Xorwow:
    """One independent stream of 32-bit words; rows with equal seeds draw equal numbers."""

    __slots__ = ("_counter", "_words")

    def __init__(self, seed: int) -> None:
        low = ((seed & _MASK) ^ 0xAAD26B49) * 1099087573 & _MASK
        high = ((seed >> 32 & _MASK) ^ 0xF7DCEFDD) * 2591861531 & _MASK
        self._counter = 6615241 + low + high & _MASK
        self._words = (
            123456789 + low & _MASK,
            362436069 ^ low,
            521288629 + high & _MASK,
            88675123 ^ high,
            5783321 + low & _MASK,
        )

    def word(self) -> int:
        """Return the next unsigned 32-bit number."""
        first, *rest = self._words
        last = rest[-1]
        mixed = first ^ first >> 2
        new = (last ^ last << 4) ^ (mixed ^ mixed << 1)
        new &= _MASK
        self._words = (rest[0], rest[1], rest[2], last, new)
        self._counter = self._counter + 362437 & _MASK
        return new + self._counter & _MASK

    def uniform(self) -> float:
        """Return the next number in (0, 1], rounded as in FP32 arithmetic."""
        # The product is exact and the double sum too, so only the conversions round.
        return float(np.float32(float(np.float32(self.word())) * 2.0**-32 + 2.0**-33))
