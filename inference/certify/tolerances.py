"""Tolerances: the largest difference from the source that rounding explains, by type."""

from collections.abc import Iterable, Mapping

# Largest error that rounding explains, as a share of the largest compared value. fp32 has 24
# significant bits: its error comes from the order of sums, and grows over the layers. fp16 and bf16
# keep 11 and 8 bits of every weight, int8 about 7: each bound is some 20 units of that rounding.
# With fewer bits (FP8 keeps 4), 20 units exceed the value itself, so the bound is 1: it detects
# only a different function, while the comparison of tensors still holds them to their rounding.
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 8e-2, "int8": 1.5e-1}
_COARSER = 1.0
ROUTED = "a rounded mixture"  # a mixture of experts in which rounding may choose another expert


def tolerance_of(types: Iterable[str]) -> float:
    """Return the tolerance of the coarsest type; fp32's if there is none."""
    tolerances = (TOLERANCES.get(kind, _COARSER) for kind in types)
    return max(tolerances, default=TOLERANCES["fp32"])
