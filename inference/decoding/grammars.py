"""Answers of a given form: JSON of a schema, a regular expression, a choice, a grammar.

llguidance, an optional package, says which tokens may come next. It is asked in a thread, while the
model computes the step that these tokens are chosen from.
"""

# Shapes: X vocabulary, rounded up

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np

from inference.decoding.tensor_fields import Array

MAX_GRAMMAR_BYTES = 64 << 10
# The keys of a structure, as vLLM's `structured_outputs` has them; a structure has one.
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
# A model that is unsure of what comes next may otherwise go on with white space to the last token.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{0,32}"}
_MAX_CACHED = 64  # compiled grammars
_MISSING = "needs the package llguidance where the model is served: pip install llguidance"


@dataclass(frozen=True)
class TokenTexts:
    """The tokens of a model: the bytes of each, those that are not text, and what encodes text."""

    pieces: Sequence[bytes]
    special_ids: Sequence[int]
    encode: Callable[[str], list[int]]


def compiled(structure: Mapping[str, Any]) -> str:
    """Return the grammar of a structure with one of the keys `STRUCTURES`.

    Raises ValueError for another, or without llguidance.
    """
    if len(structure) != 1 or not structure.keys() <= {*STRUCTURES}:
        raise ValueError(f"expected one of {', '.join(STRUCTURES)}, got {', '.join(structure)}")
    ((key, value),) = structure.items()
    library = _library()
    if key == "json" and isinstance(value, str):
        value = json.loads(value)
    if key in ("json", "json_object"):
        schema = value if key == "json" else {"type": "object"}
        if not isinstance(schema, dict | bool):
            raise ValueError("json: expected a schema, which is an object")
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), _JSON_OPTIONS)
    elif key == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(e, str) for e in value):
            raise ValueError("choice: expected a list of texts")
        grammar = library.grammar_from("choice", json.dumps(value))
    elif isinstance(value, str):
        grammar = library.grammar_from(key, value)
    else:
        raise ValueError(f"{key}: expected a text")
    if problem := library.LLMatcher.validate_grammar(grammar):
        raise ValueError(f"{key}: {str(problem)[:400]}")
    return str(grammar)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ValueError(_MISSING) from None
    return llguidance


class Constraint:
    """The tokens that may come next in one row; not for several threads."""

    def __init__(self, matcher: Any, size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        self._bits = np.zeros(-(-size // 32), np.int32)
        self._filled = self._begin()

    @property
    def problem(self) -> str:
        """Why no token can follow, "" while one can: grammars may outgrow llguidance's limits."""
        if not (reason := str(self._matcher.get_error())):
            return ""
        # The state of the parser follows in further lines.
        return f"no text goes on so in the form that is asked for: {reason.splitlines()[0][:400]}"

    def mask(self) -> Array:
        """Return a bit for each token that may come next, lowest first, (X / 8,) uint8."""
        self._filled.result()
        return self._bits.view(np.uint8) * np.uint8(not self._matcher.is_error())

    def take(self, token: int) -> bool:
        """Take the row's next token; return whether nothing can follow."""
        self._filled.result()
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return False  # `mask` says so
        is_complete = bool(self._matcher.is_stopped())
        if not is_complete:
            self._filled = self._begin()
        return is_complete

    def _begin(self) -> "Future[None]":
        return self._threads.submit(self._fill)

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)


class Grammars:
    """Makes constraints for one model; its tokens are read before the first."""

    def __init__(
        self, texts: Callable[[], TokenTexts], *, vocab_size: int, end_ids: Sequence[int]
    ) -> None:
        self._texts, self._size = texts, vocab_size
        self._end_ids = [token for token in end_ids if 0 <= token < vocab_size]
        self._lock = Lock()
        self._matcher = lru_cache(_MAX_CACHED)(self._compile)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(thread_name_prefix="grammars")

    @cached_property
    def _tokenizer(self) -> Any:
        library, texts = _library(), self._texts()
        known = list(texts.pieces[: self._size])
        # Ids beyond the tokenizer's own, and tokens without bytes, never come up.
        named = [piece or b"\xff<%d>" % index for index, piece in enumerate(known)]
        named += [b"\xff<%d>" % index for index in range(len(known), self._size)]
        nameless = [index for index, piece in enumerate(named) if piece.startswith(b"\xff<")]

        class Texts:
            eos_token_id, bos_token_id, tokens = self._end_ids[0], None, named
            special_token_ids = sorted({*texts.special_ids, *nameless, *self._end_ids})

            def __call__(self, text: str) -> list[int]:
                return texts.encode(text)

        wrapper = library.TokenizerWrapper(Texts())
        return library.LLTokenizer(wrapper, n_vocab=self._size, eos_token=self._end_ids)

    def constraint(self, structure: str) -> Constraint:
        """Return the constraint of a structure, given as JSON. Raises ValueError."""
        with self._lock:
            matcher = self._matcher(structure).deep_copy()
        return Constraint(matcher, self._size, self._threads)

    def _compile(self, structure: str) -> Any:
        """Return the matcher of a structure, which stays as it is."""
        value = json.loads(structure)
        if not isinstance(value, dict):
            raise ValueError("expected an object of JSON")
        if not self._end_ids:
            raise ValueError("the model has no end token in its vocabulary")
        matcher = _library().LLMatcher(self._tokenizer, compiled(value))
        if matcher.is_error():
            raise ValueError(str(matcher.get_error())[:400])
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise ValueError("no text has this form; does a rule need itself?")
        return matcher
