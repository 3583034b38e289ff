"""Types of weight files: name, bytes per value, torch type.

Only `torch_dtype` imports torch, when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bytes per value on disk. Little-endian; bf16 is the upper half of an fp32.
ITEM_SIZE: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}

WEIGHT_DATA_TYPES: tuple[str, ...] = ("fp32", "fp16", "bf16")

# Largest finite value of each floating type.
LARGEST_FINITE: dict[str, float] = {
    "fp32": 3.4028234663852886e38,
    "fp16": 65504.0,
    "bf16": 3.3895313892515355e38,
}

_TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


def item_size(name: str) -> int:
    """Return the bytes of one value of type `name`.

    Raises:
        ValueError: The name is not a type of a weight file.
    """
    try:
        return ITEM_SIZE[name]
    except KeyError:
        raise ValueError(f"unknown data type {name!r}; known: {', '.join(ITEM_SIZE)}") from None


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of `name` ("fp32", "fp16", "bf16" or "int8").

    Raises:
        ValueError: The name is not a type of a weight file.
    """
    import torch

    item_size(name)
    dtype = getattr(torch, _TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
