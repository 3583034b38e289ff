"""Text to token ids and back, and the word lists of a request, from files in a repository.

Nothing is fetched: a tokenizer is the files beside the model that uses it.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from export_scripts.triton.tokenizer_files import TOKENIZER_KINDS, TokenizerFiles, find_tokenizer

REPLACEMENT = "\ufffd"
# UTF-8 needs at most three more bytes, so an unfinished character shows as at most three of these.
_MAX_UNFINISHED = 3


class Tokenizer(Protocol):
    """What the text models need of a tokenizer. `special_ids` are markers, not text."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, with the model's own start and end markers if `special`."""

    def decode(self, ids: Sequence[int], *, partial: bool = False) -> str:
        """Return the text of `ids`; unknown ids give the replacement character.

        With `partial` more ids will follow: a character that is not complete yet is left out.
        """


def load_tokenizer(folder: Path, *, kind: str | None = None) -> Tokenizer:
    """Return the tokenizer whose files lie in `folder`.

    Raises:
        ValueError: there is none (of that kind), or its files are not readable.
    """
    found = find_tokenizer(folder, kind=kind)
    if found is None:
        wanted = {kind: TOKENIZER_KINDS[kind]} if kind else TOKENIZER_KINDS
        choices = "; ".join(" with ".join(names) for names in wanted.values())
        raise ValueError(f"{folder} holds no tokenizer; expected {choices}.")
    try:
        return _LOADERS[found.kind](found)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        names = ", ".join(path.name for path in found.files)
        raise ValueError(f"{names} in {folder} cannot be read as a tokenizer: {error}") from error


def _byte_stand_ins() -> dict[int, str]:
    """Map each byte to the printable character that stands for it in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, take the
    characters from U+0100 on (GPT-2, encoder.py).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + position) for position, byte in enumerate(others)
    }


class ByteLevelBPE:
    """Byte-level BPE from vocab.json and merges.txt, with GPT-2's splitting of the text."""

    def __init__(self, vocab_path: Path, merges_path: Path) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        vocab = json.loads(vocab_path.read_text(encoding="utf-8"))
        self._backend = Backend(BPE.from_file(str(vocab_path), str(merges_path)))
        self._backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
        self.vocab_size = len(vocab)
        stand_ins = {character: byte for byte, character in _byte_stand_ins().items()}
        self._bytes = {index: _token_bytes(token, stand_ins) for token, index in vocab.items()}
        lines = merges_path.read_text(encoding="utf-8").splitlines()
        products = {line.replace(" ", "") for line in lines}
        # What is neither a byte nor the product of a merge never comes from text.
        self.special_ids = frozenset(
            index for token, index in vocab.items() if len(token) > 1 and token not in products
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:  # noqa: ARG002
        """Return the ids of `text`; a byte-level vocabulary has no markers of its own."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, partial: bool = False) -> str:
        """Return the text of `ids`, see `Tokenizer`."""
        unknown = REPLACEMENT.encode()
        data = b"".join(self._bytes.get(index, unknown) for index in ids)
        # Not final: the decoder keeps an unfinished character to itself.
        return codecs.getincrementaldecoder("utf-8")("replace").decode(data, not partial)


def _token_bytes(token: str, stand_ins: dict[str, int]) -> bytes:
    if all(character in stand_ins for character in token):
        return bytes(stand_ins[character] for character in token)
    return token.encode()  # an added token, spelled as it is


class _WholeTextTokenizer:
    """A library that turns lists of known ids into text, with the unknown ones around it."""

    vocab_size: int

    def _decode_known(self, ids: list[int]) -> str:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], *, partial: bool = False) -> str:
        """Return the text of `ids`, see `Tokenizer`."""
        text = "".join(self._pieces(ids))
        if partial:
            kept = text.rstrip(REPLACEMENT)
            return kept if len(text) - len(kept) <= _MAX_UNFINISHED else text
        return text

    def _pieces(self, ids: Sequence[int]) -> Iterator[str]:
        for known, run in groupby(ids, key=lambda index: 0 <= index < self.vocab_size):
            group = [int(index) for index in run]
            yield self._decode_known(group) if known else REPLACEMENT * len(group)


class HuggingFaceTokenizer(_WholeTextTokenizer):
    """A tokenizer.json of the tokenizers library, whatever its model."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, see `Tokenizer`."""
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def _decode_known(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class SentencePieceTokenizer(_WholeTextTokenizer):
    """A SentencePiece model."""

    def __init__(self, model_path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self._backend = SentencePieceProcessor(model_file=str(model_path))
        self.vocab_size = int(self._backend.vocab_size())
        self.special_ids = frozenset(filter(self._backend.is_control, range(self.vocab_size)))

    def encode(self, text: str, *, special: bool = False) -> list[int]:  # noqa: ARG002
        """Return the ids of `text`; the model file does not say which markers a model wants."""
        return list(self._backend.encode(text))

    def _decode_known(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids))


def _load_hf(found: TokenizerFiles) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    try:
        return HuggingFaceTokenizer(Backend.from_file(str(found.files[0])))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error)) from error


def _load_wordpiece(found: TokenizerFiles) -> Tokenizer:
    """Cased WordPiece, as BERT's and NeMo's cased vocabularies are used."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece

    backend = Backend(WordPiece.from_file(str(found.files[0]), unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return HuggingFaceTokenizer(backend)


_LOADERS: dict[str, Callable[[TokenizerFiles], Tokenizer]] = {
    "hf": _load_hf,
    "bpe": lambda found: ByteLevelBPE(*found.files),
    "sentencepiece": lambda found: SentencePieceTokenizer(found.files[0]),
    "wordpiece": _load_wordpiece,
}


def split_words(text: str) -> list[str]:
    """Return the words of one CSV record; blanks count, a comma in a word needs quotes.

    Raises:
        ValueError: there is an unquoted line break inside.
    """
    try:
        # A list of one line: an empty string still is a record, without fields.
        return next(csv.reader([text]))
    except csv.Error as error:
        raise ValueError(f"{text!r} is not one CSV record ({error})") from error


def word_list_tensor(
    rows: Sequence[str], tokenizer: Tokenizer, *, name: str
) -> npt.NDArray[np.int32]:
    """Return the (B, 2, W) tensor of the words in each row's CSV record.

    Ids of all words come one after another, above the offset at which each word ends; unused places
    hold id 0 and offset -1.

    Raises:
        ValueError: rows that are no CSV record, each named `name[row]`.
    """
    problems, flat_rows, offset_rows = [], [], []
    for row, text in enumerate(rows):
        flat: list[int] = []
        offsets: list[int] = []
        try:
            for word in split_words(text):
                if ids := tokenizer.encode(word):
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
