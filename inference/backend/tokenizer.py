"""Text to token ids and back, from files in a repository.

Nothing is downloaded: the files of a tokenizer are next to the model that uses it.
"""

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
    tokenizer_settings,
)

REPLACEMENT = "\ufffd"
# A text model answers one request after the other: a text of this size takes it some seconds, and
# is longer than what any model reads.
MOST_TEXT_BYTES = 1 << 20
# WordPiece looks each beginning of a word up, from each place in it: its time grows with the square
# of the length of words and more. 64 KiB of the longest words take a second.
_MOST_WORDPIECE_BYTES = 1 << 16
_LONGEST_WORD = 200  # files say 100
# The space that SentencePiece and similar models put before a text.
_BLANK = "\u2581"
# Put before a word, it gives the word the tokens that it has inside a text.
_BEFORE = "!"
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_BYTE_LEVEL_SPACE = "\u0120"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(folder: Path, *, kind: str | None = None) -> Tokenizer:
    """Return the tokenizer whose files lie in `folder`, of one kind if it is given.

    Raises ValueError if there is none, or its files are unreadable.
    """
    found = find_tokenizer(folder, kind=kind)
    if found is None:
        wanted = {kind: TOKENIZER_KINDS[kind]} if kind else TOKENIZER_KINDS
        choices = "; ".join(" with ".join(names) for names in wanted.values())
        raise ValueError(f"{folder} holds no tokenizer; expected {choices}.")
    try:
        return _LOADERS[found.kind](found)
    except Exception as error:  # tokenizers raises nothing narrower, and files can hold anything
        names = ", ".join(path.name for path in found.all_files)
        reason = f"there is no token {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{names} in {folder} cannot be read as a tokenizer: {reason}") from error


def _start_marker(found: TokenizerFiles) -> str | None:
    """Return the token that the settings put before every text, as those of OPT and Llama do."""
    if found.settings is None:
        return None
    settings = tokenizer_settings(found.settings)
    # transformers 4's Llama tokenizer puts <s> before a text unless its settings say otherwise.
    is_llama = found.kind == "sentencepiece" and settings.get("tokenizer_class") in _LLAMA_CLASSES
    if not settings.get("add_bos_token", is_llama):
        return None
    token = settings.get("bos_token", "<s>" if is_llama else None)
    return (token.get("content") if isinstance(token, dict) else token) or None


class Tokenizer:
    """Base of the tokenizers, whose libraries decode known ids; unknown ones are handled here.

    Attributes:
        most_text_bytes: of a text that it encodes within seconds, whatever its words.
        special_ids: markers, not text.
        prefix_ids: the markers that `encode` puts before a text if `special`.
    """

    vocab_size: int
    most_text_bytes = MOST_TEXT_BYTES
    special_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    _bytes: Mapping[int, int] = MappingProxyType(
        {}
    )  # tokens of single bytes, for characters outside the vocabulary
    _piece: Callable[[int], str]  # the vocabulary's spelling of an id
    _decode_known: Callable[[list[int]], str]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, with the model's own start and end markers if `special`."""
        raise NotImplementedError

    def word_forms(self, word: str) -> list[list[int]]:
        """Return the token sequences of `word` in a text: at its start, and after other words.

        They differ where a tokenizer puts a space before each text and the word follows its
        neighbour without one, as a full stop or a line break does.
        """
        alone = self.encode(word)
        before, together = self.encode(_BEFORE), self.encode(_BEFORE + word)
        adds_blank = bool(before) and self._piece(before[0]).startswith(_BLANK)
        if not adds_blank or together[: len(before)] != before:
            return [alone]
        inside = together[len(before) :]
        return [alone] if inside in (alone, []) else [alone, inside]

    def token_bytes(self, index: int) -> bytes | None:
        """Return the bytes that a token stands for, None where its text says it all."""
        byte = self._bytes.get(index)
        return None if byte is None else bytes([byte])

    def vocabulary(self) -> list[bytes]:
        """Return the bytes of every token; those of markers are their names."""
        own = map(self.token_bytes, range(self.vocab_size))
        return [
            (self._piece(index) or "").replace(_BLANK, " ").encode() if each is None else each
            for index, each in enumerate(own)
        ]

    def decode(self, ids: Sequence[int], *, partial: bool = False) -> str:
        """Return the text of `ids`; unknown ids give the replacement character.

        With `partial`, further ids follow, and an incomplete last character is left out.
        """
        text = ""
        mended = self._mended([*map(int, ids)], partial=partial)
        if mended and 0 <= min(mended) <= max(mended) < self.vocab_size:
            text = self._decode_known(mended)
        else:
            for known, run in groupby(mended, key=range(self.vocab_size).__contains__):
                group = list(run)
                text += self._decode_known(group) if known else REPLACEMENT * len(group)
        # A token of several bytes can end within a character, which decodes to one of these.
        return text.removesuffix(REPLACEMENT) if partial else text

    def _mended(self, ids: list[int], *, partial: bool) -> list[int]:
        """Return `ids` with the bytes of incomplete characters replaced by a replacement character.

        Libraries drop a whole run of byte tokens for one that is incomplete.
        """
        if self._bytes.keys().isdisjoint(ids):
            return ids
        mended: list[int] = []
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
    """A tokenizer.json of the tokenizers library, of any model.

    `start_marker` comes before each text, if the file itself does not put it there.
    """

    def __init__(self, backend: Any, *, start_marker: str | None = None) -> None:
        self._backend, self._piece = backend, backend.id_to_token
        self._decode_known = partial(backend.decode, skip_special_tokens=False)
        longest_word = getattr(backend.model, "max_input_chars_per_word", None)
        if longest_word is not None:
            self.most_text_bytes = _MOST_WORDPIECE_BYTES
            if longest_word > _LONGEST_WORD:
                raise ValueError(
                    f"max_input_chars_per_word={longest_word}, with which one word can take hours; "
                    f"set it to {_LONGEST_WORD} or less"
                )
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        letter = backend.token_to_id("<0x41>")
        falls_back = letter is not None and backend.decode([letter]) == "A"
        self._bytes = _byte_tokens(vocab) if falls_back else {}
        own = list(backend.encode("a", add_special_tokens=True).ids)
        plain = list(backend.encode("a", add_special_tokens=False).ids)
        count = next((n for n in range(len(own)) if own[n : n + len(plain)] == plain), 0)
        self._more: list[int] = []
        if start_marker is not None and not count:
            self._more = [vocab[start_marker]]
        self.prefix_ids = (*self._more, *own[:count])
        decoder = backend.decoder
        is_byte_level = decoder is not None and decoder.decode([_BYTE_LEVEL_SPACE]) == " "
        self._added = frozenset(added)
        self._letters = _byte_level_letters() if is_byte_level else {}

    def token_bytes(self, index: int) -> bytes | None:
        """Return the bytes of a token, see `Tokenizer`; letters stand for them in GPT-2's way."""
        if not self._letters or index in self._added or not 0 <= index < self.vocab_size:
            return super().token_bytes(index)
        letters = self._piece(index) or ""
        return bytes(self._letters[each] for each in letters if each in self._letters)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, see `Tokenizer`."""
        ids = self._backend.encode(text, add_special_tokens=special).ids
        return [*(self._more if special else ()), *ids]


def _byte_level_letters() -> dict[str, int]:
    """Return the letters by which a byte-level vocabulary spells bytes (GPT-2, encoder.py)."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in printed)
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def _byte_tokens(vocab: Mapping[str, int]) -> dict[int, int]:
    """Return the tokens of single bytes, if the vocabulary has all 256."""
    matches = ((_BYTE_PIECE.fullmatch(token), index) for token, index in vocab.items())
    found = {index: int(match[1], 16) for match, index in matches if match}
    return found if len(found) == 256 else {}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. `start_marker` is a token before each text; None for none."""

    def __init__(self, model_path: Path, *, start_marker: str | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        self._backend = backend = SentencePieceProcessor(model_file=str(model_path))
        self._piece, self._decode_known = backend.id_to_piece, backend.decode
        self.vocab_size = int(self._backend.vocab_size())
        every = range(self.vocab_size)
        self.special_ids = frozenset(filter(self._backend.is_control, every))
        self._bytes = _byte_tokens(
            {self._piece(index): index for index in every if self._backend.is_byte(index)}
        )
        self.prefix_ids = tuple(self._backend[token] for token in (start_marker,) if token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`, see `Tokenizer`."""
        prefix = self.prefix_ids if special else ()
        return [*prefix, *self._backend.encode(text)]


def _load_hf(found: TokenizerFiles) -> Tokenizer:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(found.files[0]))
    # A file keeps what it was last used with: a prompt is neither cut nor padded.
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


_LOADERS: dict[str, Callable[[TokenizerFiles], Tokenizer]] = {
    "hf": _load_hf,
    "bpe": _load_bpe,
    "sentencepiece": lambda found: SentencePieceTokenizer(
        found.files[0], start_marker=_start_marker(found)
    ),
    "wordpiece": _load_wordpiece,
}
