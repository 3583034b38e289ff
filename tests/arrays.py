"""Arrays of the converter as torch tensors, to compare with what torch makes of the same."""

import numpy as np
import torch

from export_scripts.checkpoints.base import FileMaps, Piece, StoredTensor
from export_scripts.numeric.arrays import BF16, Array


def as_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor."""
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def as_array(tensor: torch.Tensor) -> Array:
    """Return a view of a tensor as an array."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BF16)
    return tensor.numpy()


def in_one_file(piece: Piece) -> StoredTensor:
    """Return a piece that is known to lie in one file."""
    assert isinstance(piece, StoredTensor)
    return piece


def loaded(piece: Piece) -> torch.Tensor:
    return as_torch(in_one_file(piece).load(FileMaps()))
