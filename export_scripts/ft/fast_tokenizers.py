"""Tokenizers of the `tokenizers` library, built from other libraries' files.

Facts of SentencePiece: google/sentencepiece, src/sentencepiece_model.proto, src/normalizer.cc,
src/bpe_model.cc, src/unigram_model.cc and src/sentencepiece_processor.cc.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from export_scripts.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    WORD,
)
from foundations.files.json_content import is_count, json_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

# The space in SentencePiece's pieces.
BLANK = "\u2581"
# Unicode noncharacters, which no text holds: between a character and its marks, for an unknown
# token, and for user-defined symbols.
_JOINT, _UNKNOWN = "\ufdd0", "\ufdd1"
_PLACES = [chr(code) for code in range(0xFDD2, 0xFDF0)]
_WITHIN_GRAPHEMES = r"(?<=[\s\S])(?=[\p{M}\x{200d}\x{ff9e}\x{ff9f}])|(?<=\r)(?=\n)"


def piece_texts(model: Any, *kinds: int) -> list[str]:
    """Return the texts of all pieces of the given kinds in a ModelProto."""
    return [piece.piece for piece in model.pieces if piece.type in kinds]


def sentencepiece_tokenizer(model: Any) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model.

    Its control symbols and the unknown piece become special tokens. The normaliser must get a whole
    text: the pre-tokenizer, which runs later, splits user-defined symbols off.

    Raises:
        ValueError: The library has no equal.
    """
    from tokenizers import AddedToken, Tokenizer, models

    trainer = model.trainer_spec
    if trainer.model_type == WORD:
        raise ValueError("it was trained as whole words (model_type word)")
    if model.denormalizer_spec.precompiled_charsmap:
        raise ValueError("it has a denormalizer_spec, rules for decoded text")
    kinds = [piece.type for piece in model.pieces]
    if kinds.count(UNKNOWN) != 1:
        raise ValueError("it has no unknown piece, or several")
    unknown = kinds.index(UNKNOWN)
    if trainer.model_type == UNIGRAM:
        backend = Tokenizer(
            models.Unigram(_unigram_scores(model), unknown, byte_fallback=trainer.byte_fallback)
        )
    else:
        vocabulary = {piece.piece: index for index, piece in enumerate(model.pieces)}
        backend = Tokenizer(
            models.BPE(
                vocabulary,
                _merges(model) if trainer.model_type == BPE else [],
                unk_token=model.pieces[unknown].piece,
                fuse_unk=True,
                byte_fallback=trainer.byte_fallback,
                ignore_merges=bool(piece_texts(model, USER_DEFINED)),
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
        [AddedToken(text, normalized=False) for text in piece_texts(model, UNKNOWN, CONTROL)]
    )
    return backend


def _unigram_scores(model: Any) -> list[tuple[str, float]]:
    """Return the scores as SentencePiece uses them: user-defined symbols win over all others."""
    # Its maximum starts at the smallest positive float, and scores are usually negative.
    best = max([0.0, *(piece.score for piece in model.pieces if piece.type == NORMAL)])
    return [
        (
            piece.piece,
            len(piece.piece.encode()) * best - 0.1 if piece.type == USER_DEFINED else piece.score,
        )
        for piece in model.pieces
    ]


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return every pair whose product is a piece, the best product first."""
    usable = {piece.piece for piece in model.pieces if piece.type == NORMAL}
    ranks = {piece.piece: index for index, piece in enumerate(model.pieces)}
    merges = [
        (-piece.score, ranks[piece.piece], left, right)
        for piece in model.pieces
        if piece.type == NORMAL
        for cut in range(1, len(piece.piece))
        if (left := piece.piece[:cut]) in usable and (right := piece.piece[cut:]) in usable
    ]
    merges.sort(key=lambda each: (each[0], ranks[each[2]], ranks[each[3]]))
    return [(left, right) for _, _, left, right in merges]


def _normalizer(model: Any) -> Any:
    from tokenizers import Regex, normalizers

    spec = model.normalizer_spec
    blank = BLANK if spec.escape_whitespaces else " "
    add = (
        normalizers.Replace(Regex(r"(?<=[\s\S])\z"), blank)
        if model.trainer_spec.treat_whitespace_as_suffix
        else normalizers.Prepend(blank)
    )
    steps = []
    if spec.add_dummy_prefix and not spec.remove_extra_whitespaces:
        steps.append(add)
    if spec.precompiled_charsmap:
        steps += _character_table(model)
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {BLANK}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if spec.add_dummy_prefix:
            steps.append(add)
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", BLANK))
    return normalizers.Sequence(steps)


def _character_table(model: Any) -> list[Any]:
    """Return the steps that replace characters by the model's table.

    The library applies the table to graphemes: it loses a mark after a replaced character and finds
    few pairs. It therefore gets single characters, and NFC composes pairs as the table would.
    User-defined symbols must not be replaced: noncharacters stand for them meanwhile.
    """
    from tokenizers import Regex, normalizers

    table = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    symbols = [
        text for text in piece_texts(model, USER_DEFINED) if table.normalize_str(text) != text
    ]
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


def _cuts(model: Any) -> Any:
    """Return the pre-tokenizer that keeps user-defined symbols whole, but no other pieces."""
    from tokenizers import Regex, pre_tokenizers

    symbols = piece_texts(model, USER_DEFINED)
    # The library finds these in a text (with symbols: if they are the whole text); SentencePiece
    # never does.
    hidden = [text for text in piece_texts(model, UNKNOWN, CONTROL, BYTE) if len(text) > 1]
    steps = []
    if symbols and model.trainer_spec.model_type != UNIGRAM:
        steps.append(pre_tokenizers.Split(Regex(_choice(symbols)), behavior="isolated"))
    if hidden and (symbols or model.trainer_spec.model_type == UNIGRAM):
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


def _decoder(model: Any) -> Any:
    from tokenizers import Regex, decoders

    spec, surface = model.normalizer_spec, model.trainer_spec.unk_surface
    (unknown,) = piece_texts(model, UNKNOWN)
    steps: list[Any] = [decoders.Replace(unknown, _UNKNOWN)]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        count = "+" if spec.remove_extra_whitespaces else ""
        steps.append(decoders.Replace(Regex(rf"\A{BLANK}{count}"), ""))
    steps += [decoders.Replace(BLANK, " "), decoders.Replace(_UNKNOWN, surface)]
    return decoders.Sequence(steps)


def gpt2_tokenizer(vocabulary: bytes, merges: str) -> Tokenizer:
    """Return the byte-level BPE of vocab.json and merges.txt, with GPT-2's splitting of text.

    A token that is neither a byte nor the product of a merge never results from text: it is made a
    special token.

    Raises:
        ValueError: The files have another form, or are not of the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = json_object(vocabulary, "vocab.json")
    if not ids or not all(map(is_count, ids.values())):
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
    return with_special(backend, (t for t in ids if len(t) > 1 and t not in products))


def with_special(backend: Tokenizer, tokens: Iterable[str]) -> Tokenizer:
    """Make tokens of the vocabulary special; return the tokenizer."""
    from tokenizers import AddedToken

    ids = backend.get_vocab()
    in_order = sorted(tokens, key=ids.__getitem__)
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in in_order])
    return backend


def wordpiece_tokenizer(data: bytes, *, is_lower: bool | None = None) -> Tokenizer:
    """Return the WordPiece tokenizer of a vocab.txt.

    It lowercases texts if `is_lower`; None: if no piece has an uppercase letter.
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
    return with_special(backend, marks)
