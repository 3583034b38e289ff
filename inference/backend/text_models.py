"""The text models of a repository: preprocessing, postprocessing and the encoders' tokenizer.

The tokenizer is loaded once, from the files next to the model. A bad request gets an error without
affecting the other requests of its batch.
"""

# Shapes: B rows, K beams, S padded prompt, L prompt and answer

import csv
import math
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, product, takewhile
from typing import Any

import numpy as np

from export_scripts.triton.parameters import FLAG, TOKEN_ID, TOKEN_IDS
from inference.backend.arguments import ModelArguments
from inference.backend.requests import Array, Tensors
from inference.backend.tensor_model import TensorModel
from inference.backend.tokenizer import MAX_TEXT_BYTES, Tokenizer, load_tokenizer

_MAX_WORDS_BYTES = 64 << 10
_MAX_SHOWN = 80  # characters of a wrong record in an error
_FULL_ROWS = 4  # rows of maximum size in a request
_MAX_TOKENS = 8 << 20  # in all rows of a request, with padding


class _Encoder(TensorModel):
    """Encodes texts, each followed by the end token if the parameter append_end_id is set."""

    def setup(self, arguments: ModelArguments) -> None:
        """Load the tokenizer in the model's parameters."""
        self.tokenizer = _tokenizer(arguments)
        self._end_id = arguments.read("end_id", TOKEN_ID)
        self._suffix = [self._end_id] if arguments.flag("append_end_id") else []

    def encode(
        self, texts: Sequence[str], *, name: str, special: bool = True
    ) -> tuple[Array, Array]:
        """Return ids padded with the end token, (B, S), and lengths, (B, 1).

        Raises ValueError if only some texts are empty, which models do not accept in one batch, or
        if the padded rows are too large.
        """
        rows = [self.tokenizer.encode(text, special=special) + self._suffix for text in texts]
        if any(rows) and not all(rows):
            empty = ", ".join(f"{name}[{row}]" for row, ids in enumerate(rows) if not ids)
            raise ValueError(f"{empty}: an empty text must be sent in a separate request")
        longest = max(map(len, rows), default=0)
        if len(rows) * longest > _MAX_TOKENS:
            raise ValueError(
                f"{name}: {len(rows)} rows of up to {longest} tokens; {_MAX_TOKENS} at most in "
                "all, padded to the longest; send fewer rows"
            )
        return pad_rows(rows, pad_id=self._end_id)


class Preprocessing(_Encoder):
    """Text and word lists to token ids."""

    def run(self, tensors: Tensors) -> dict[str, Array]:
        """See `turn`."""
        return self.turn(tensors, continues=False)

    def turn(self, tensors: Tensors, *, continues: bool) -> dict[str, Array]:
        """Return ids, lengths and word lists; without a start token if the turn `continues`.

        Raises ValueError, which names every problem.
        """
        texts = row_texts("QUERY", tensors["QUERY"], max_bytes=self.tokenizer.max_text_bytes)
        rows = len(texts)
        words, problems = {}, []
        for kind in ("BAD_WORDS", "STOP_WORDS"):
            source, records = f"{kind}_DICT", [""] * rows
            if source in tensors:
                records = row_texts(source, tensors[source], max_bytes=_MAX_WORDS_BYTES)
            if len(records) != rows:
                problems.append(f"{source}: expected {rows} rows as in QUERY, got {len(records)}")
                continue
            try:
                words[f"{kind}_IDS"] = word_list_tensor(records, self.tokenizer, name=source)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        ids, lengths = self.encode(texts, name="QUERY", special=not continues)
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "REQUEST_OUTPUT_LEN": tensors["REQUEST_OUTPUT_LEN"],
            **words,
        }


class QueryTokenizer(_Encoder):
    """Text to token ids for an encoder, without word lists."""

    def run(self, tensors: Tensors) -> dict[str, Array]:
        """Return ids and lengths. Raises ValueError for input that is not text."""
        texts = row_texts("query", tensors["query"], max_bytes=self.tokenizer.max_text_bytes)
        ids, lengths = self.encode(texts, name="query")
        return {"input_ids": ids, "request_input_len": lengths}


class Postprocessing(TensorModel):
    """Token ids to text: the prompt and the answer, without the end tokens that pad the row.

    Parameter `answer_only` omits the prompt; `output_holds_prompt` 0 means that the model does not
    return it (an encoder-decoder). With `streaming`, the text of an unfinished answer ends before
    an incomplete character.
    """

    def setup(self, arguments: ModelArguments) -> None:
        """Load the tokenizer in the model's parameters."""
        self.tokenizer = _tokenizer(arguments)
        end_id = str(arguments.read("end_id", TOKEN_ID))
        self.end_ids = frozenset(arguments.read("end_ids", TOKEN_IDS, default=end_id))
        self.answer_only = arguments.flag("answer_only")
        self.output_holds_prompt = arguments.read("output_holds_prompt", FLAG, default="1")
        self.streaming = arguments.flag("streaming")
        self.strict_lengths = arguments.flag("strict_lengths")

    def run(self, tensors: Tensors) -> dict[str, Array]:
        """Return the texts, (B, K). Raises ValueError for shapes that do not fit."""
        tokens = tensors["TOKENS_BATCH"]
        if tokens.ndim != 3:
            raise ValueError(f"TOKENS_BATCH: expected shape [B,K,L], got {list(tokens.shape)}")
        if tokens.size > _MAX_TOKENS:
            raise ValueError(f"TOKENS_BATCH: {tokens.size} tokens; {_MAX_TOKENS} at most")
        starts = self._starts(tensors, tokens.shape[:2])
        counts = self._counts(tensors, starts, tokens.shape)
        finished = None
        if "IS_FINISHED" in tensors:
            finished = _one_each("IS_FINISHED", tensors, tokens.shape[:2])
        # Without sequence_length, an answer ends before its first end token.
        first_end = starts is not None and "sequence_length" not in tensors
        capacity = tokens.shape[2] - (0 if starts is None else int(starts.max(initial=0)))
        prefix = self.tokenizer.prefix_ids  # special tokens that preprocessing has prepended
        texts = np.empty(tokens.shape[:2], dtype=object)  # (B, K)
        for b, k in product(*map(range, texts.shape)):
            start = 0 if starts is None else int(starts[b, k])
            ids = tokens[b, k, : counts[b, k]].tolist()
            if self.output_holds_prompt and tuple(ids[: len(prefix)]) == prefix:
                ids, start = ids[len(prefix) :], max(start - len(prefix), 0)
            answer = _without_end(ids[start:], self.end_ids, first=first_end)
            more = self.streaming and len(answer) < capacity
            more = more and (finished is None or not finished[b, k])
            texts[b, k] = self._text(ids[:start], answer, partial=more).encode()
        return {"OUTPUT": texts}

    def _counts(self, tensors: Tensors, starts: Array | None, shape: tuple[int, ...]) -> Array:
        """Return the number of tokens of prompt plus answer in each row, (B, K)."""
        if starts is None or "sequence_length" not in tensors:
            return np.full(shape[:2], shape[2])
        counts = _one_each("sequence_length", tensors, shape[:2]).astype(np.int64)
        if not self.strict_lengths:
            # sequence_length includes the padding to the longest prompt.
            counts = counts - starts.max(initial=0) + starts
        return counts.clip(0, shape[2])

    def _starts(self, tensors: Tensors, shape: tuple[int, ...]) -> Array | None:
        """Return the start of each answer, (B, K), None if the request does not state it."""
        if not self.output_holds_prompt:
            return np.zeros(shape, np.int64)
        for name in ("RESPONSE_INPUT_LENGTHS", "REQUEST_INPUT_LEN"):
            if name in tensors:
                starts = tensors[name].reshape(shape[0], -1)
                if starts.shape[1] not in (1, shape[1]):
                    raise _wrong_shape(name, shape, tensors[name])
                return np.broadcast_to(starts, shape).clip(0)
        return None

    def _text(self, prompt: Sequence[int], answer: Sequence[int], *, partial: bool) -> str:
        whole = self.tokenizer.decode([*prompt, *answer], partial=partial)
        if not self.answer_only:
            return whole
        # Decoding it together with the prompt keeps the answer's leading space.
        before = self.tokenizer.decode(prompt)
        if whole.startswith(before):
            return whole[len(before) :]
        return self.tokenizer.decode(answer, partial=partial)


def _one_each(name: str, tensors: Tensors, shape: tuple[int, ...]) -> Array:
    """Return an input with one value for each text, (B, K). Raises ValueError."""
    if tensors[name].size != math.prod(shape):
        raise _wrong_shape(name, shape, tensors[name])
    return tensors[name].reshape(shape)


def _wrong_shape(name: str, shape: tuple[int, ...], value: Array) -> ValueError:
    return ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")


def _without_end(answer: Sequence[int], end_ids: Collection[int], *, first: bool) -> Sequence[int]:
    """Return an answer without trailing end tokens; with `first`, up to its first end token."""
    if first:
        return [*takewhile(lambda token: token not in end_ids, answer)]
    count = len(answer)
    while count and answer[count - 1] in end_ids:
        count -= 1
    return answer[:count]


def _tokenizer(arguments: ModelArguments) -> Tokenizer:
    folder = arguments.version_folder / arguments.read("tokenizer_path", default=".")
    return load_tokenizer(folder, kind=arguments.read("tokenizer_type", default="") or None)


def row_texts(name: str, tensor: Array, *, max_bytes: int = MAX_TEXT_BYTES) -> list[str]:
    """Return one string per row of a (B, 1) tensor of bytes.

    Raises ValueError for another shape, a value that is not UTF-8 or larger than `max_bytes`, or
    more than four times that in all.
    """
    if tensor.ndim != 2 or tensor.shape[1] != 1:
        raise ValueError(f"{name}: expected shape [B,1], got {list(tensor.shape)}")
    sizes = [len(value) for value in tensor[:, 0]]
    if max(sizes, default=0) > max_bytes:
        row = sizes.index(max(sizes))
        raise ValueError(f"{name}[{row}]: {sizes[row]} bytes; {max_bytes} at most")
    if sum(sizes) > _FULL_ROWS * max_bytes:
        raise ValueError(
            f"{name}: {sum(sizes)} bytes in all; {_FULL_ROWS * max_bytes} at most; send fewer rows"
        )
    return [_text_of(value, f"{name}[{row}]") for row, value in enumerate(tensor[:, 0])]


def _text_of(value: str | bytes, name: str) -> str:
    try:
        return value if isinstance(value, str) else bytes(value).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 at byte {error.start}") from error


def split_words(text: str) -> list[str]:
    """Return the words of one CSV record; spaces are kept, a word with a comma needs quotes.

    Raises ValueError for an unquoted line break.
    """
    try:
        # In a list, an empty string is a record without fields.
        return next(csv.reader([text]))
    except csv.Error as error:
        reason = "quote a word that has a line break" if "\n" in text or "\r" in text else error
        shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
        raise ValueError(f"{shown!r} is not one CSV record: {reason}") from error


def word_list_tensor(rows: Sequence[str], tokenizer: Tokenizer, *, name: str) -> Array:
    """Return the (B, 2, W) tensor of the words in each row's CSV record.

    The first row has the concatenated ids of all words, the second the offsets at which words end;
    they are padded with 0 and -1. Raises ValueError, which names each `name[row]` that is not a CSV
    record.
    """
    problems, found = [], []
    for row, text in enumerate(rows):
        try:
            forms = [form for word in split_words(text) for form in tokenizer.word_forms(word)]
        except ValueError as error:
            problems.append(f"{name}[{row}]: {error}")
            continue
        found.append([ids for ids in forms if ids])
    if problems:
        raise ValueError("\n".join(problems))
    ids = [[*chain(*words)] for words in found]
    ends = [[*accumulate(map(len, words))] for words in found]
    width = max((1, *map(len, ids)))
    return np.stack(
        (padded_rows(ids, width, 0, np.int32), padded_rows(ends, width, -1, np.int32)), axis=1
    )


def pad_rows(rows: Sequence[Sequence[int]], *, pad_id: int) -> tuple[Array, Array]:
    """Return the rows padded on the right, (B, S), and their lengths, (B, 1)."""
    lengths = np.array([[len(row)] for row in rows], dtype=np.uint32)  # (B, 1)
    return padded_rows(rows, max(map(len, rows), default=0), pad_id, np.uint32), lengths


def padded_rows(rows: Sequence[Sequence[Any]], width: int, pad: Any, dtype: Any) -> Array:
    """Return the rows padded on the right to a width, (B, S)."""
    found = np.full((len(rows), width), pad, dtype)
    for target, row in zip(found, rows, strict=True):
        target[: len(row)] = row
    return found
