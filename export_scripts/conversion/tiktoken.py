"""A tokenizer.json from the vocabularies of Megatron's and NeMo's TikTokenizer.

Layout and defaults: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py and NVIDIA/NeMo,
nemo/collections/common/tokenizers/tiktoken_tokenizer.py.
"""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from export_scripts.checkpoints.base import Files, read_small
from export_scripts.checkpoints.tokenizers import GeneratedFile, is_list
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.ft.fast_tokenizers import with_special
from export_scripts.ft.tokenizer_files import SETTINGS_FILE
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import Fields, Table

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WHOLE = "tokenizer.json"
_VOCABULARY = 1 << 17
_SPECIAL_COUNT = 1000
_SPECIAL = ("<unk>", "<s>", "</s>")
_MORE_SPECIAL = (*_SPECIAL, "<mask>", "<pad>", "<cls>", "<sep>")  # megatron-core
# The letter for each byte in byte-level vocabularies: its own if printable, else the next free one.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_FREE = iter(range(0x100, 0x200))
_BYTES = [chr(byte if byte in _PRINTABLE else next(_FREE)) for byte in range(256)]

# How Megatron's TikTokTokenizer splits a text, by --tiktoken-pattern. NeMo's pattern is v2.
_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


_Ranks = Mapping[bytes, int]  # token -> rank, in order of rank


def with_tiktoken(files: Files, config: Table) -> Files:
    """Return a source's tokenizer files, with a tokenizer.json in place of a list of tokens.

    Raises:
        CheckpointMismatchError: The list or the settings have another form, or the tokenizer.json
            gives other IDs.
    """
    name = next((n for n in (_WHOLE, "vocab.json") if n in files and is_list(files[n])), None)
    if name is None:
        return dict(files)
    path = files[name].path
    try:
        backend, names = _build(read_small(files[name]), config)
        whole = backend.to_str().encode()
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{files[name]} as a vocabulary of tiktoken: {error}"
        ) from error
    made = {_WHOLE: whole, SETTINGS_FILE: json.dumps(names, indent=2).encode()}
    rest = {other: file for other, file in files.items() if other != name}
    return {**rest, **{n: GeneratedFile(path, name=n, content=data) for n, data in made.items()}}


def _build(data: bytes, config: Table) -> "tuple[Tokenizer, Fields]":
    tokenizer = config.get("tokenizer")
    is_nemo = isinstance(tokenizer, Mapping) and "library" in tokenizer
    stated = tokenizer if isinstance(tokenizer, Mapping) else config
    size = stated.get("vocab_size") or _VOCABULARY
    count = stated.get("tiktoken_num_special_tokens") or _SPECIAL_COUNT
    special = stated.get("tiktoken_special_tokens") or (_SPECIAL if is_nemo else _MORE_SPECIAL)
    pattern = stated.get("tiktoken_pattern") or "v2"
    if not isinstance(pattern, str) or pattern not in _PATTERNS:
        raise ValueError(f"tiktoken_pattern = {pattern!r}: expected {' or '.join(_PATTERNS)}")
    if type(size) is not int or type(count) is not int or not 0 <= count < size:
        raise ValueError(
            f"vocab_size = {size!r} and tiktoken_num_special_tokens = {count!r}: expected numbers, "
            "the second below the first"
        )
    if not isinstance(special, Sequence) or not {*_SPECIAL} <= {*special}:
        raise ValueError(f"tiktoken_special_tokens = {special!r}: expected {_SPECIAL} among them")
    every = [*special, *(f"<SPECIAL_{number}>" for number in range(len(special), count))]
    if len({*every}) != count:
        raise ValueError(f"tiktoken_special_tokens has a token twice, or more than {count}")
    ranks = _ranks(data, size - count)
    backend = _tokenizer(ranks, every, _PATTERNS[pattern])
    backend.encode_special_tokens = True
    _compare(backend, ranks, count)
    return backend, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # A special token's spelling in a text is the token for megatron-core, and text for NeMo.
        "split_special_tokens": is_nemo,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


def _compare(backend: "Tokenizer", ranks: _Ranks, first: int) -> None:
    """Check that probes have the IDs that merges by rank give, and decode to themselves."""
    values = {letter: byte for byte, letter in enumerate(_BYTES)}
    for text in PROBES:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        runs = [bytes(values[letter] for letter in word) for word in words]
        parts = [part for run in runs for part in _merged_parts(run, ranks, len(ranks))]
        wanted = [first + ranks[part] for part in parts]
        found = backend.encode(text, add_special_tokens=False).ids
        if found != wanted or backend.decode(found) != text:
            raise ValueError(f"{text!r} has the IDs {wanted}, but {found} in a tokenizer.json")


def _ranks(data: bytes, most: int) -> _Ranks:
    """Return the first tokens of a vocabulary in order; raises ValueError for anything else."""
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
    return {token: rank for rank, token in enumerate(tokens)}


def _tokenizer(ranks: _Ranks, special: Sequence[str], pattern: str) -> "Tokenizer":
    """Return a tokenizer of tokens by rank; special tokens have the first IDs."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    def spelled(token: bytes) -> str:
        return "".join(_BYTES[byte] for byte in token)

    ids = {text: index for index, text in enumerate(special)}
    ids |= {spelled(token): len(special) + rank for token, rank in ranks.items()}
    if len(ids) != len(special) + len(ranks):
        raise ValueError("a special token is spelled as another one")
    merges = [
        (spelled(parts[0]), spelled(parts[1]))
        for token, rank in ranks.items()
        if len(token) > 1 and len(parts := _merged_parts(token, ranks, rank)) == 2
    ]
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return with_special(backend, special)


def _merged_parts(token: bytes, ranks: _Ranks, end: int) -> list[bytes]:
    """Return the tokens of some bytes after merges of ranks below `end`, lowest rank first."""
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
