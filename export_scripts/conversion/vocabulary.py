"""Removal of the rows that training added to the vocabulary so that ranks divide it.

Megatron pads to a multiple of 128 times the tensor-parallel ranks (`make_vocab_size_divisible_by`).
"""

import dataclasses
from collections.abc import Mapping

from export_scripts.checkpoints.base import (
    CheckpointReader,
    Files,
    Pieces,
    json_file,
    read_small,
    rows_of,
)
from export_scripts.checkpoints.huggingface import TIED_TABLES
from export_scripts.checkpoints.tokenizers import sentencepiece_model
from foundations.errors import CheckpointMismatchError
from foundations.files.json_content import nested

OF_TOKENIZER = "tokenizer"
# Suffixes of tensors with a row for each token; transformers' embeddings and heads come first.
_TABLES = (
    *TIED_TABLES, "output_layer.weight", "output_layer.bias", "lm_head.bias", "embed_out.bias",
    "tokens_head.bias", "predictions.bias",
)  # fmt: skip
# Format -> settings that state the number of rows.
_SIZES = {"huggingface": ("vocab_size",), "megatron": ("padded_vocab_size",)}


def with_vocabulary(
    reader: CheckpointReader, stated: str | None, tokenizer: Files
) -> CheckpointReader:
    """Return a model with as many rows of its vocabulary as stated, or as its tokenizer has IDs.

    A table of tokens that is not recognised keeps its rows, and is refused later for its shape.

    Raises:
        CheckpointMismatchError: The size is not a number or `tokenizer`, exceeds the model's, or is
            below the tokenizer's; or there is no tokenizer.
    """
    if stated is None:
        return reader
    needed = _ids(tokenizer)
    size = needed if stated == OF_TOKENIZER else int(stated) if stated.isdecimal() else None
    if not size:
        raise CheckpointMismatchError(
            f"{reader.path}: --vocabulary={stated}: expected a positive number"
            + ("; it has no tokenizer" if needed is None else f" or {OF_TOKENIZER}")
        )
    tables = {name: pieces for name, pieces in reader.tensors.items() if name.endswith(_TABLES)}
    rows = max((rows_of(pieces) for pieces in tables.values()), default=0)
    if not (needed or 0) <= size <= rows:
        raise CheckpointMismatchError(
            f"{reader.path}: --vocabulary={stated} keeps {size} rows: expected from {needed or 1} "
            f"(IDs of the tokenizer) to {rows} (rows of the model)"
        )
    kept = {
        name: _first(pieces, size) for name, pieces in tables.items() if rows_of(pieces) == rows
    }
    sizes = {key: size for key in _SIZES.get(reader.format, ()) if key in reader.config}
    return dataclasses.replace(
        reader,
        tensors={**reader.tensors, **kept},
        config={**reader.config, **sizes},
        remarks=(*reader.remarks, f"kept {size} of the {rows} rows of the vocabulary"),
    )


def _first(pieces: Pieces, size: int) -> Pieces:
    """Return as many pieces, with the first `size` rows of all."""
    kept = []
    for piece in pieces:
        rows = min(piece.shape[0], size)
        size -= rows
        kept.append(piece.rows(0, rows))
    return tuple(kept)


def _ids(files: Files) -> int | None:
    """Return a tokenizer's number of IDs; `files` are by their names in the FT folder."""
    if "tokenizer.json" in files:
        table = json_file(files["tokenizer.json"])
        words = nested(table, "model", "vocab")
        ids = [*words.values()] if isinstance(words, Mapping) else [len(words or ()) - 1]
        ids += [token.get("id") for token in table.get("added_tokens") or ()]
    elif "tokenizer.model" in files:
        ids = [len(sentencepiece_model(files["tokenizer.model"]).pieces) - 1]
    elif "vocab.json" in files:
        ids = [*json_file(files["vocab.json"]).values()]
    elif "vocab.txt" in files:
        ids = [len(read_small(files["vocab.txt"]).splitlines()) - 1]
    else:
        return None
    return 1 + max((token_id for token_id in ids if type(token_id) is int), default=-1)
