"""Marks of a slot's token ids: those its sequence has seen, and those it may not choose.

Penalties and bans act on the next token by these marks, one byte for each slot and vocabulary id.
"""

# Shapes: V vocabulary

from __future__ import annotations

import numpy as np

from inference.model.kv_cache import Array

SEEN, BANNED = 1, 2  # other ids are 0


def marks_of(ids: Array, vocab_size: int) -> Array:
    """Return the marks (V,) uint8 for ids that a sequence has seen, and ~ids that are banned."""
    marks = np.zeros(vocab_size, np.uint8)
    marks[ids[ids >= 0]] = SEEN
    marks[~ids[ids < 0]] = BANNED
    return marks


def marks_bytes(slots: int, vocab_size: int) -> int:
    """Return the memory of a rank's marks; one slot more serves choices that no step reads."""
    return (slots + 1) * vocab_size
