"""Tolerances: the largest difference from the source that rounding explains, by type."""

from collections.abc import Iterable, Mapping

# Largest error that rounding explains, of the largest value of what is compared. fp32 computes
# with 24 significant bits: what remains is the order of sums, which grows over the layers. fp16
# and bf16 keep 11 and 8 bits of every weight, int8 about 7: each bound is some 20 units of that.
# Of fewer bits (FP8 keeps 4) so many units are more than the value, which is their bound: it finds
# another function alone, and the tensors are held to their rounding.
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 8e-2, "int8": 1.5e-1}
_OF_FEWER_BITS = 1.0
ROUTED = "a rounded mixture"  # whose experts may be others


def tolerance_of(types: Iterable[str]) -> float:
    """Return the tolerance of the coarsest of some types; that of fp32 where there are none."""
    found = (TOLERANCES.get(kind, _OF_FEWER_BITS) for kind in types)
    return max(found, default=TOLERANCES["fp32"])
