"""Vocabularies of Megatron's and NeMo's TikTokenizer, of which a tokenizer.json is made.

Layout and defaults: megatron/core/tokenizers/text/libraries/tiktoken_tokenizer.py and NVIDIA/NeMo,
nemo/collections/common/tokenizers/tiktoken_tokenizer.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from export_scripts.checkpoints.base import Region, read_small
from export_scripts.checkpoints.tokenizers import MadeFile, is_list
from export_scripts.conversion.tokenizer_probes import PROBES
from export_scripts.errors import CheckpointMismatchError
from export_scripts.files.json_content import Fields, Table
from export_scripts.ft.fast_tokenizers import (
    BYTES,
    TIKTOKEN_PATTERNS,
    merged_parts,
    read_tiktoken,
    tiktoken_tokenizer,
)
from export_scripts.ft.tokenizer_files import SETTINGS_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WHOLE = "tokenizer.json"
_VOCABULARY = 1 << 17
_SPECIAL_COUNT = 1000
_SPECIAL = ("<unk>", "<s>", "</s>")
_MORE_SPECIAL = (*_SPECIAL, "<mask>", "<pad>", "<cls>", "<sep>")  # of megatron-core


def with_tiktoken(files: Mapping[str, Region], config: Table) -> dict[str, Region]:
    """Return a source's tokenizer files, with a tokenizer.json in place of a list of tokens.

    Raises:
        CheckpointMismatchError: The list or the settings are something else, or the ids differ.
    """
    name = next((n for n in (_WHOLE, "vocab.json") if n in files and is_list(files[n])), None)
    if name is None:
        return dict(files)
    path = files[name].path
    try:
        backend, names = _made(read_small(files[name]), config)
        whole = backend.to_str().encode()
    except ValueError as error:
        raise CheckpointMismatchError(
            f"{files[name]} as a vocabulary of tiktoken: {error}"
        ) from error
    made = {_WHOLE: whole, SETTINGS_FILE: json.dumps(names, indent=2).encode()}
    rest = {other: file for other, file in files.items() if other != name}
    return {**rest, **{n: MadeFile(path, name=n, content=data) for n, data in made.items()}}


def _made(data: bytes, config: Table) -> "tuple[Tokenizer, Fields]":
    tokenizer = config.get("tokenizer")
    is_nemo = isinstance(tokenizer, Mapping) and "library" in tokenizer
    stated = tokenizer if isinstance(tokenizer, Mapping) else config
    size = stated.get("vocab_size") or _VOCABULARY
    count = stated.get("tiktoken_num_special_tokens") or _SPECIAL_COUNT
    special = stated.get("tiktoken_special_tokens") or (_SPECIAL if is_nemo else _MORE_SPECIAL)
    pattern = stated.get("tiktoken_pattern") or "v2"
    if not isinstance(pattern, str) or pattern not in TIKTOKEN_PATTERNS:
        raise ValueError(
            f"tiktoken_pattern = {pattern!r}: expected {' or '.join(TIKTOKEN_PATTERNS)}"
        )
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
    tokens = read_tiktoken(data, size - count)
    backend = tiktoken_tokenizer(tokens, every, TIKTOKEN_PATTERNS[pattern])
    backend.encode_special_tokens = True
    _compare(backend, tokens, count)
    return backend, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # megatron-core takes the spelling of a special token for the token, NeMo for text.
        "split_special_tokens": is_nemo,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }


def _compare(backend: "Tokenizer", tokens: Sequence[bytes], first: int) -> None:
    """Compare ids with those that merges by rank give, and texts with themselves."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    values = {letter: byte for byte, letter in enumerate(BYTES)}
    for text in PROBES:
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        runs = [bytes(values[letter] for letter in word) for word in words]
        parts = [part for run in runs for part in merged_parts(run, ranks, len(ranks))]
        wanted = [first + ranks[part] for part in parts]
        found = backend.encode(text, add_special_tokens=False).ids
        if found != wanted or backend.decode(found) != text:
            raise ValueError(f"{text!r} has the ids {wanted}, {found} in a tokenizer.json")
