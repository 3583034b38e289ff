"""Word lists: parsing of the (2, W) tensors of a request, and matching of tokens.

Row 0 holds the ids of all entries, concatenated; row 1 their exclusive end offsets, padded with -1.
Source: FasterTransformer 5.3, kernels/ban_bad_words.cu and stop_criteria_kernels.cu.
"""

from collections.abc import Sequence

import numpy as np

from inference.decoding.tensor_fields import Array, TensorFields

# Over all rows of a request, since each step checks every word.
MAX_IDS = 1 << 18
TokenIds = tuple[int, ...]
Words = tuple[TokenIds, ...]


def read_word_lists(fields: TensorFields, name: str, *, shared: bool) -> list[Words]:
    """Return the entries of every row; with `shared`, one (2, W) list may serve all rows."""
    value = fields.array(name, "iu", (fields.batch, 2, -1), *[(2, -1)] * shared)
    if value is None or not value.size:
        return [()] * fields.batch
    width = value.shape[-1]
    if fields.batch * width > MAX_IDS:
        fields.problems.append(
            f"{name}: {width} ids for each of {fields.batch} rows; at most {MAX_IDS} in all"
        )
        return [()] * fields.batch
    rows = value.astype(np.int64).reshape(-1, 2, width)  # (1 or B, 2, W)
    lists = [read_entries(*row) for row in rows]
    fields.problems += [
        f"{name}[{b}]: bad offsets {rows[b, 1].tolist()}; they must not decrease nor exceed {width}"
        for b, entries in enumerate(lists)
        if entries is None
    ]
    return [entries or () for entries in lists] * (fields.batch // len(rows))


def read_entries(ids: Array, offsets: Array) -> Words | None:
    """Return the distinct, non-empty entries of one row, or None if the offsets are invalid.

    Offsets end at the first negative value; they must neither decrease nor exceed the width W.
    """
    ends = offsets.tolist()
    entries: dict[TokenIds, None] = {}
    start = 0
    for end in ends:
        if end < 0:
            break
        if end < start or end > len(ids):
            return None
        if end > start:
            entries[tuple(ids[start:end].tolist())] = None
        start = end
    return tuple(entries)


def ends_with(history: Sequence[int], words: Words) -> bool:
    """Return whether `history` ends with one of `words`."""
    last = history[-1] if history else None
    return any(word[-1] == last and tuple(history[-len(word) :]) == word for word in words)


def banned_ids(history: Sequence[int], words: Words, vocab_size: int) -> list[int]:
    """Return the ids that would complete one of `words`; id 0 is never banned."""
    size = len(history)
    return [
        word[-1]
        for word in words
        if 0 < word[-1] < vocab_size and tuple(history[size + 1 - len(word) :]) == word[:-1]
    ]
