"""Texts as the tensors of a request: padded token ids, and word lists of CSV records."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inference.backend.tokenizer import Tokenizer

_MOST_SHOWN = 80  # characters of a wrong record


def split_words(text: str) -> list[str]:
    """Return the words of one CSV record; spaces count, a comma in a word needs quotes.

    Raises:
        ValueError: there is an unquoted line break inside.
    """
    try:
        # A list of one line: an empty string is a record, too, without fields.
        return next(csv.reader([text]))
    except csv.Error as error:
        reason = "quote a word that has a line break" if "\n" in text or "\r" in text else error
        shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
        raise ValueError(f"{shown!r} is not one CSV record: {reason}") from error


def word_list_tensor(
    rows: Sequence[str], tokenizer: Tokenizer, *, name: str
) -> npt.NDArray[np.int32]:
    """Return the (B, 2, W) tensor of the words in each row's CSV record.

    Ids of all words come one after another, above the offset at which each word ends; unused places
    hold id 0 and offset -1.

    Raises:
        ValueError: some rows are not CSV records, each named `name[row]`.
    """
    problems, flat_rows, offset_rows = [], [], []
    for row, text in enumerate(rows):
        flat: list[int] = []
        offsets: list[int] = []
        try:
            forms = (form for word in split_words(text) for form in tokenizer.word_forms(word))
            for ids in filter(None, forms):
                flat += ids
                offsets.append(len(flat))
        except ValueError as error:
            problems.append(f"{name}[{row}]: {error}")
        flat_rows.append(flat)
        offset_rows.append(offsets)
    if problems:
        raise ValueError("\n".join(problems))
    width = max(1, *(len(flat) for flat in flat_rows)) if flat_rows else 1
    tensor = np.zeros((len(flat_rows), 2, width), dtype=np.int32)
    tensor[:, 1, :] = -1
    for row, (flat, offsets) in enumerate(zip(flat_rows, offset_rows, strict=True)):
        tensor[row, 0, : len(flat)] = flat
        tensor[row, 1, : len(offsets)] = offsets
    return tensor


def pad_rows(
    rows: Sequence[Sequence[int]], *, pad_id: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the rows padded on the right, (B, S), and their lengths, (B, 1)."""
    lengths = np.array([[len(row)] for row in rows], dtype=np.uint32)  # (B, 1)
    ids = np.full((len(rows), max(map(len, rows), default=0)), pad_id, dtype=np.uint32)  # (B, S)
    for target, row in zip(ids, rows, strict=True):
        target[: len(row)] = row
    return ids, lengths
