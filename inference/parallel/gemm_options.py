"""Options of all matrix products of a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmOptions:
    """Form of all matrices; all but `int8` needs a GPU with Triton, and 16 bits."""

    int8: bool = False  # whole numbers of 8 bits, one scale per output
    fp8: bool = False  # E4M3, activations too
    batch_invariant: bool = False  # the bits of a row do not depend on the other rows


PLAIN_GEMM = GemmOptions()
