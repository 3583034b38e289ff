"""Tokenizers of the `tokenizers` library, built from the files of others.

Facts of SentencePiece: google/sentencepiece, src/sentencepiece_model.proto, src/normalizer.cc,
src/bpe_model.cc, src/unigram_model.cc and src/sentencepiece_processor.cc.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from export_scripts.files.json_content import json_object
from export_scripts.wire_format import WireFormatError, wire_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tokenizers import Tokenizer

# The space of SentencePiece's pieces.
BLANK = "\u2581"
# ModelProto.
_PIECES, _TRAINER, _NORMALIZER, _DENORMALIZER = 1, 2, 3, 5
# ModelProto.SentencePiece.Type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# TrainerSpec.ModelType.
_UNIGRAM, _BPE, _WORD, _CHAR = 1, 2, 3, 4
# Noncharacters of Unicode, which no text holds: between a character and its marks, for an unknown
# token, for symbols of the user's.
_JOINT, _UNKNOWN = "\ufdd0", "\ufdd1"
_PLACES = [chr(code) for code in range(0xFDD2, 0xFDF0)]
_WITHIN_GRAPHEMES = r"(?<=[\s\S])(?=[\p{M}\x{200d}\x{ff9e}\x{ff9f}])|(?<=\r)(?=\n)"


@dataclass(frozen=True)
class VocabularyPiece:
    """An entry of a SentencePiece model's vocabulary."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a SentencePiece model that decide its ids."""

    pieces: Sequence[VocabularyPiece]
    model_type: int
    byte_fallback: bool
    blank_at_end: bool  # treat_whitespace_as_suffix
    unknown_text: str  # to which an unknown id is decoded
    charsmap: bytes
    adds_blank: bool  # add_dummy_prefix
    removes_blanks: bool  # remove_extra_whitespaces
    writes_blanks: bool  # escape_whitespaces
    changes_decoded: bool  # denormalizer_spec

    def texts(self, *kinds: int) -> list[str]:
        """Return the texts of all pieces of some kinds."""
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Return the content of a tokenizer.model.

    Raises:
        ValueError: It is not one.
    """
    pieces = []
    specs: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}, _DENORMALIZER: {}}
    for field in wire_fields(data):
        if field.content is None:
            continue
        if field.number == _PIECES:
            pieces.append(_piece(data[field.content]))
        elif field.number in specs:
            specs[field.number].update(_values(data[field.content]))
    trainer, normalizer = specs[_TRAINER], specs[_NORMALIZER]
    if not pieces:
        raise WireFormatError("it has no pieces")
    return SentencePieceModel(
        pieces=pieces,
        model_type=trainer.get(3, _UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        blank_at_end=bool(trainer.get(24, 0)),
        unknown_text=trainer.get(44, " \u2047 ".encode()).decode(),
        charsmap=normalizer.get(2, b""),
        adds_blank=bool(normalizer.get(3, 1)),
        removes_blanks=bool(normalizer.get(4, 1)),
        writes_blanks=bool(normalizer.get(5, 1)),
        changes_decoded=bool(specs[_DENORMALIZER].get(2)),
    )


def _values(data: bytes) -> Iterator[tuple[int, Any]]:
    for field in wire_fields(data):
        yield field.number, field.value if field.content is None else data[field.content]


def _piece(data: bytes) -> VocabularyPiece:
    text, score, kind = "", 0.0, NORMAL
    for field in wire_fields(data):
        if field.number == 1 and field.content is not None:
            text = data[field.content].decode()
        elif field.number == 2:
            (score,) = struct.unpack("<f", data[field.place][-4:])
        elif field.number == 3 and field.value is not None:
            kind = field.value
    return VocabularyPiece(text, score, kind)


def sentencepiece_tokenizer(model: SentencePieceModel) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model.

    Its control symbols and the unknown one are special tokens. A text goes through the normaliser
    as a whole, so that symbols of the user's are cut out of it later, by the pre-tokenizer.

    Raises:
        ValueError: The library has no equal.
    """
    from tokenizers import AddedToken, Tokenizer, models

    if model.model_type == _WORD:
        raise ValueError("it was trained as whole words (model_type word)")
    if model.changes_decoded:
        raise ValueError("it has a denormalizer_spec, rules for decoded text")
    kinds = [piece.kind for piece in model.pieces]
    if kinds.count(UNKNOWN) != 1:
        raise ValueError("it has no unknown piece, or several")
    unknown = kinds.index(UNKNOWN)
    if model.model_type == _UNIGRAM:
        backend = Tokenizer(
            models.Unigram(_unigram_scores(model), unknown, byte_fallback=model.byte_fallback)
        )
    else:
        vocabulary = {piece.text: index for index, piece in enumerate(model.pieces)}
        backend = Tokenizer(
            models.BPE(
                vocabulary,
                _merges(model) if model.model_type == _BPE else [],
                unk_token=model.pieces[unknown].text,
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
                ignore_merges=bool(model.texts(USER_DEFINED)),
            )
        )
    if len(model.pieces) != backend.get_vocab_size():
        raise ValueError("it has a piece twice")
    backend.normalizer = _normalizer(model)
    cuts = _cuts(model)
    if cuts is not None:
        backend.pre_tokenizer = cuts
    backend.decoder = _decoder(model)
    backend.add_special_tokens(
        [AddedToken(text, normalized=False) for text in model.texts(UNKNOWN, CONTROL)]
    )
    return backend


def _unigram_scores(model: SentencePieceModel) -> list[tuple[str, float]]:
    """Return the scores as SentencePiece takes them: symbols of the user's win over all others."""
    # Its best score begins at the least positive float, and scores are usually negative.
    best = max([0.0, *(piece.score for piece in model.pieces if piece.kind == NORMAL)])
    return [
        (
            piece.text,
            len(piece.text.encode()) * best - 0.1 if piece.kind == USER_DEFINED else piece.score,
        )
        for piece in model.pieces
    ]


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return every pair whose product is a piece, the best product first."""
    usable = {piece.text for piece in model.pieces if piece.kind == NORMAL}
    ranks = {piece.text: index for index, piece in enumerate(model.pieces)}
    merges = [
        (-piece.score, ranks[piece.text], left, right)
        for piece in model.pieces
        if piece.kind == NORMAL
        for cut in range(1, len(piece.text))
        if (left := piece.text[:cut]) in usable and (right := piece.text[cut:]) in usable
    ]
    merges.sort(key=lambda each: (each[0], ranks[each[2]], ranks[each[3]]))
    return [(left, right) for _, _, left, right in merges]


def _normalizer(model: SentencePieceModel) -> Any:
    from tokenizers import Regex, normalizers

    blank = BLANK if model.writes_blanks else " "
    add = (
        normalizers.Replace(Regex(r"(?<=[\s\S])\z"), blank)
        if model.blank_at_end
        else normalizers.Prepend(blank)
    )
    steps: list[Any] = []
    if model.adds_blank and not model.removes_blanks:
        steps.append(add)
    if model.charsmap:
        steps += _character_table(model)
    if model.removes_blanks:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {BLANK}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if model.adds_blank:
            steps.append(add)
    if model.writes_blanks:
        steps.append(normalizers.Replace(" ", BLANK))
    return normalizers.Sequence(steps)


def _character_table(model: SentencePieceModel) -> list[Any]:
    """Return the steps that replace characters by the model's table.

    The library's reading of the table loses a mark after a character that is replaced, and finds
    few pairs: it gets one character at a time, and NFC joins what the table would. Symbols of the
    user's are not looked up: other characters stand for them meanwhile.
    """
    from tokenizers import Regex, normalizers

    table = normalizers.Precompiled(model.charsmap)
    symbols = [text for text in model.texts(USER_DEFINED) if table.normalize_str(text) != text]
    places = dict(zip(sorted(symbols, key=len, reverse=True), _PLACES, strict=False))
    composes = table.normalize_str("e\u0301") == "\u00e9"
    return [
        *(normalizers.Replace(symbol, place) for symbol, place in places.items()),
        normalizers.Replace(Regex(_WITHIN_GRAPHEMES), _JOINT),
        table,
        normalizers.Replace(_JOINT, ""),
        *([normalizers.NFC()] if composes else []),
        *(normalizers.Replace(place, symbol) for symbol, place in places.items()),
    ]


def _cuts(model: SentencePieceModel) -> Any:
    """Return the pre-tokenizer that keeps symbols whole, and no others from becoming whole."""
    from tokenizers import Regex, pre_tokenizers

    symbols = model.texts(USER_DEFINED)
    # The library finds these in a text, or where a text is one, if symbols are kept whole;
    # SentencePiece never does.
    hidden = [text for text in model.texts(UNKNOWN, CONTROL, BYTE) if len(text) > 1]
    steps = []
    if symbols and model.model_type != _UNIGRAM:
        steps.append(pre_tokenizers.Split(Regex(_choice(symbols)), behavior="isolated"))
    if hidden and (symbols or model.model_type == _UNIGRAM):
        patterns = (
            f"{re.escape(head)}(?=(?:{_choice(t[1:] for t in hidden if t[0] == head)}))"
            for head in sorted({text[0] for text in hidden})
        )
        steps.append(
            pre_tokenizers.Split(Regex("|".join(patterns)), behavior="merged_with_previous")
        )
    return pre_tokenizers.Sequence(steps) if steps else None


def _choice(texts: Any) -> str:
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))


def _decoder(model: SentencePieceModel) -> Any:
    from tokenizers import Regex, decoders

    (unknown,) = model.texts(UNKNOWN)
    steps: list[Any] = [decoders.Replace(unknown, _UNKNOWN)]
    if model.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.adds_blank or model.removes_blanks:
        count = "+" if model.removes_blanks else ""
        steps.append(decoders.Replace(Regex(rf"\A{BLANK}{count}"), ""))
    steps += [decoders.Replace(BLANK, " "), decoders.Replace(_UNKNOWN, model.unknown_text)]
    return decoders.Sequence(steps)


def gpt2_tokenizer(vocabulary: bytes, merges: str) -> Tokenizer:
    """Return the byte-level BPE of vocab.json and merges.txt, with GPT-2's splitting of the text.

    A token that is neither a byte nor the product of a merge never comes from text: it is special.

    Raises:
        ValueError: The files are something else, or are not of one tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = json_object(vocabulary, "vocab.json")
    if not ids or not all(type(index) is int and index >= 0 for index in ids.values()):
        raise ValueError("vocab.json is not a vocabulary: it is empty, or an id is not a number")
    lines = (line.rstrip("\r") for line in merges.split("\n"))
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("a line of merges.txt is not two tokens")
    backend = Tokenizer(models.BPE(ids, [(left, right) for left, right in pairs]))
    if backend.get_vocab_size() != len({*ids.values()}):
        raise ValueError("vocab.json has an id twice")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    products = {"".join(pair) for pair in pairs}
    return _with_special(backend, (t for t in ids if len(t) > 1 and t not in products))


def _with_special(backend: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    from tokenizers import AddedToken

    ids = backend.get_vocab()
    in_order = sorted(tokens, key=ids.__getitem__)
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in in_order])
    return backend


def wordpiece_tokenizer(data: bytes, *, is_lower: bool | None = None) -> Tokenizer:
    """Return the WordPiece of a vocab.txt.

    A text is lowered if `is_lower`; None: if no piece has a capital letter.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    lines = data.decode().splitlines()
    while lines and not lines[-1]:
        lines.pop()
    ids = {line.rstrip(): index for index, line in enumerate(lines)}
    marks = [mark for mark in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if mark in ids]
    if is_lower is None:
        is_lower = not any(piece != piece.lower() for piece in ids.keys() - {*marks})
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _with_special(backend, marks)


# The letter that stands for each byte in byte-level vocabularies: its own, or the next free one.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_FREE = iter(range(0x100, 0x200))
BYTES = [chr(byte if byte in _PRINTABLE else next(_FREE)) for byte in range(256)]

# Splitting of a text by Megatron's TikTokTokenizer, --tiktoken-pattern. NeMo's is the second.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def read_tiktoken(data: bytes, most: int) -> list[bytes]:
    """Return the first tokens of a vocabulary of Megatron's TikTokTokenizer, by rank.

    Layout: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py.

    Raises:
        ValueError: It is not one.
    """
    try:
        entries = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(entries, list):
        raise ValueError("it is not a list of tokens")
    tokens = []
    for rank, entry in enumerate(entries[:most]):
        if not isinstance(entry, dict) or entry.get("rank") != rank:
            raise ValueError(f"its entry {rank} is not the token of that rank: {entry!r:.100}")
        tokens.append(base64.b64decode(str(entry.get("token_bytes")), validate=True))
    if len(set(tokens)) != len(tokens) or not set(tokens) >= {bytes([n]) for n in range(256)}:
        raise ValueError("it has a token twice, or lacks a byte")
    return tokens


def tiktoken_tokenizer(tokens: Sequence[bytes], special: Sequence[str], pattern: str) -> Tokenizer:
    """Return the tokenizer of tokens by rank, whose ids come after those of the special ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    def spelled(token: bytes) -> str:
        return "".join(BYTES[byte] for byte in token)

    ids = {text: index for index, text in enumerate(special)}
    ids |= {spelled(token): len(special) + rank for rank, token in enumerate(tokens)}
    if len(ids) != len(special) + len(tokens):
        raise ValueError("a special token is spelled as another one")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [
        (spelled(parts[0]), spelled(parts[1]))
        for token in tokens
        if len(token) > 1 and len(parts := merged_parts(token, ranks, ranks[token])) == 2
    ]
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return _with_special(backend, special)


def merged_parts(token: bytes, ranks: Mapping[bytes, int], end: int) -> list[bytes]:
    """Return what a run of bytes becomes by merges of ranks below `end`, the lowest rank first."""
    parts = [bytes([byte]) for byte in token]
    while True:
        found = [
            (rank, index)
            for index, pair in enumerate(itertools.pairwise(parts))
            if (rank := ranks.get(pair[0] + pair[1], end)) < end
        ]
        if not found:
            return parts
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
