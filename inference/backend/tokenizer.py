"""Tokenizers, loaded from the files next to a model; nothing is downloaded."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from export_scripts.ft.fast_tokenizers import gpt2_tokenizer, wordpiece_tokenizer
from export_scripts.ft.tokenizer_files import (
    TOKENIZER_KINDS,
    TokenizerFiles,
    find_tokenizer,
    tokenizer_errors,
    tokenizer_settings,
)

REPLACEMENT = "\ufffd"
# A text model answers requests one at a time. A text of this size takes a few seconds and is longer
# than any model's context.
MAX_TEXT_BYTES = 1 << 20
# WordPiece looks up every prefix of a word from every position in it: its time grows with the
# square of the word length or faster. 64 KiB of the longest words take a second.
_MAX_WORDPIECE_BYTES = 1 << 16
_MAX_WORD_CHARACTERS = 200  # characters; real tokenizers have 100
# The space that SentencePiece and similar models put before a text.
_BLANK = "\u2581"
# A text to encode before a word, to get the word's tokens inside a text.
_BEFORE = "!"
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_BYTE_LEVEL_SPACE = "\u0120"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(folder: Path, *, kind: str | None = None) -> Tokenizer:
    """Return the tokenizer in `folder`, of a given kind or of any.

    Raises ValueError if there is none, or its files are unreadable.
    """
    found = find_tokenizer(folder, kind=kind)
    if found is None:
        wanted = {kind: TOKENIZER_KINDS[kind]} if kind else TOKENIZER_KINDS
        choices = "; ".join(" with ".join(names) for names in wanted.values())
        raise ValueError(f"{folder} holds no tokenizer; expected {choices}.")
    try:
        with tokenizer_errors():
            tokenizer = _TOKENIZER_LOADERS[found.kind](found)
            tokenizer.encode(_BEFORE, special=True)  # its last step may name a missing token
    except ValueError as error:
        names = ", ".join(path.name for path in found.all_files)
        raise ValueError(f"{names} in {folder} cannot be read as a tokenizer: {error}") from error
    return tokenizer


def _start_marker(found: TokenizerFiles) -> str | None:
    """Return the token that the settings prepend to every text, such as OPT's and Llama's."""
    if found.settings is None:
        return None
    settings = tokenizer_settings(found.settings)
    # transformers 4's Llama tokenizer prepends <s> by default.
    is_llama = found.kind == "sentencepiece" and settings.get("tokenizer_class") in _LLAMA_CLASSES
    if not settings.get("add_bos_token", is_llama):
        return None
    token = settings.get("bos_token", "<s>" if is_llama else None)
    return (token.get("content") if isinstance(token, dict) else token) or None


class Tokenizer:
    """Base of the tokenizers. Libraries decode known ids; this class handles unknown ones.

    Attributes:
        max_text_bytes: size of a text that it encodes within seconds, whatever its words.
        special_ids: special tokens, which are not part of the text.
        prefix_ids: special tokens that `encode` prepends if `special`.
    """

    vocab_size: int
    max_text_bytes = MAX_TEXT_BYTES
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    _bytes: Mapping[int, int] = MappingProxyType(
        {}
    )  # tokens of single bytes, for characters outside the vocabulary
    _piece: Callable[[int], str]  # the vocabulary's spelling of an id
    _decode_known: Callable[[list[int]], str]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`; with `special`, including the model's special tokens."""
        raise NotImplementedError

    def word_forms(self, word: str) -> list[list[int]]:
        """Return the token sequences of `word` at the start of a text and after other words.

        They differ if the tokenizer puts a space before each text, for words that follow others
        without a space, such as a full stop or a line break.
        """
        alone = self.encode(word)
        before, together = self.encode(_BEFORE), self.encode(_BEFORE + word)
        adds_blank = bool(before) and self._piece(before[0]).startswith(_BLANK)
        if not adds_blank or together[: len(before)] != before:
            return [alone]
        inside = together[len(before) :]
        return [alone] if inside in (alone, []) else [alone, inside]

    def token_bytes(self, index: int) -> bytes | None:
        """Return the bytes of a token, None if its text determines them."""
        byte = self._bytes.get(index)
        return None if byte is None else bytes([byte])

    def vocabulary(self) -> list[bytes]:
        """Return the bytes of every token; special tokens have the bytes of their names."""
        known = map(self.token_bytes, range(self.vocab_size))
        return [
            (self._piece(index) or "").replace(_BLANK, " ").encode() if data is None else data
            for index, data in enumerate(known)
        ]

    def decode(self, ids: Sequence[int], *, partial: bool = False) -> str:
        """Return the text of `ids`; unknown ids give the replacement character.

        With `partial`, further ids will follow, and an incomplete last character is left out.
        """
        text = ""
        mended = self._mended([*map(int, ids)], partial=partial)
        if mended and 0 <= min(mended) <= max(mended) < self.vocab_size:
            text = self._decode_known(mended)
        else:
            for known, run in groupby(mended, key=range(self.vocab_size).__contains__):
                group = list(run)
                text += self._decode_known(group) if known else REPLACEMENT * len(group)
        # A token can end inside a character, which then decodes to a replacement character.
        return text.removesuffix(REPLACEMENT) if partial else text

    def _mended(self, ids: list[int], *, partial: bool) -> list[int]:
        """Replace the byte tokens of incomplete characters by those of a replacement character.

        Libraries would drop the whole run of byte tokens for one incomplete character.
        """
        if self._bytes.keys().isdisjoint(ids):
            return ids
        mended = []
        seen = 0
        back = {byte: index for index, byte in self._bytes.items()}
        for is_byte, run in groupby(ids, key=self._bytes.__contains__):
            group = list(run)
            seen += len(group)
            if is_byte:
                data = bytes(self._bytes[index] for index in group)
                final = not partial or seen < len(ids)
                text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)
                group = [back[byte] for byte in text.encode()]
            mended += group
        return mended


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library (tokenizer.json).

    `start_marker` is prepended to each text, unless the file itself prepends a token.
    """

    def __init__(self, backend: Any, *, start_marker: str | None = None) -> None:
        self._backend, self._piece = backend, backend.id_to_token
        self._decode_known = partial(backend.decode, skip_special_tokens=False)
        longest_word = getattr(backend.model, "max_input_chars_per_word", None)
        if longest_word is not None:
            self.max_text_bytes = _MAX_WORDPIECE_BYTES
            if longest_word > _MAX_WORD_CHARACTERS:
                raise ValueError(
                    f"max_input_chars_per_word={longest_word}: a single word could take hours; set "
                    f"it to {_MAX_WORD_CHARACTERS} or less"
                )
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        letter = backend.token_to_id("<0x41>")
        falls_back = letter is not None and backend.decode([letter]) == "A"
        self._bytes = _byte_tokens(vocab) if falls_back else {}
        special = list(backend.encode("a", add_special_tokens=True).ids)
        plain = list(backend.encode("a", add_special_tokens=False).ids)
        count = next((n for n in range(len(special)) if special[n : n + len(plain)] == plain), 0)
        self._start: list[int] = []
        if start_marker is not None and not count:
            self._start = [vocab[start_marker]]
        self.prefix_ids = (*self._start, *special[:count])
        decoder = backend.decoder
        is_byte_level = decoder is not None and decoder.decode([_BYTE_LEVEL_SPACE]) == " "
        self._added = frozenset(added)
        self._letters = _byte_level_letters() if is_byte_level else {}

    def token_bytes(self, index: int) -> bytes | None:
        """Return the bytes of a token, see `Tokenizer`; also of GPT-2's byte-level spelling."""
        if not self._letters or index in self._added or not 0 <= index < self.vocab_size:
            return super().token_bytes(index)
        letters = self._piece(index) or ""
        return bytes(self._letters[letter] for letter in letters if letter in self._letters)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, see `Tokenizer`."""
        ids = self._backend.encode(text, add_special_tokens=special).ids
        return [*(self._start if special else ()), *ids]


def _byte_level_letters() -> dict[str, int]:
    """Return the letters with which a byte-level vocabulary spells bytes (GPT-2, encoder.py)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in printed)
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _byte_tokens(vocab: Mapping[str, int]) -> dict[int, int]:
    """Return the ids of the byte tokens, empty unless the vocabulary has all 256."""
    matches = ((_BYTE_PIECE.fullmatch(token), index) for token, index in vocab.items())
    found = {index: int(match[1], 16) for match, index in matches if match}
    return found if len(found) == 256 else {}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `start_marker` is a token to prepend to each text, None for none."""

    def __init__(self, model_path: Path, *, start_marker: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._backend = backend = SentencePieceProcessor(model_file=str(model_path))
        self._piece, self._decode_known = backend.id_to_piece, backend.decode
        self.vocab_size = int(self._backend.vocab_size())
        all_ids = range(self.vocab_size)
        self.special_ids = frozenset(filter(self._backend.is_control, all_ids))
        self._bytes = _byte_tokens(
            {self._piece(index): index for index in all_ids if self._backend.is_byte(index)}
        )
        self.prefix_ids = tuple(self._backend[token] for token in (start_marker,) if token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, see `Tokenizer`."""
        prefix = self.prefix_ids if special else ()
        return [*prefix, *self._backend.encode(text)]


def _load_hf(found: TokenizerFiles) -> Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(found.files[0]))
    # Files keep the truncation and padding that were last set.
    backend.no_truncation()
    backend.no_padding()
    settings = tokenizer_settings(found.settings) if found.settings else {}
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    return HuggingFaceTokenizer(backend, start_marker=_start_marker(found))


def _load_bpe(found: TokenizerFiles) -> Tokenizer:
    vocab, merges = found.files
    backend = gpt2_tokenizer(vocab.read_bytes(), merges.read_text("utf-8"))
    backend.encode_special_tokens = True
    return HuggingFaceTokenizer(backend, start_marker=_start_marker(found))


def _load_wordpiece(found: TokenizerFiles) -> Tokenizer:
    backend = wordpiece_tokenizer(found.files[0].read_bytes())
    backend.encode_special_tokens = True
    return HuggingFaceTokenizer(backend)


_TOKENIZER_LOADERS: dict[str, Callable[[TokenizerFiles], Tokenizer]] = {
    "hf": _load_hf,
    "bpe": _load_bpe,
    "sentencepiece": lambda found: SentencePieceTokenizer(
        found.files[0], start_marker=_start_marker(found)
    ),
    "wordpiece": _load_wordpiece,
}
