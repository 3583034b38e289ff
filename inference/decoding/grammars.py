"""Structured output: answers that match a JSON schema, a regular expression, a choice or a grammar.

llguidance, an optional package, computes which tokens may come next. It runs in a thread while the
model computes the logits that they are chosen from.
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
# The keys of vLLM's `structured_outputs`; a structure has exactly one of them.
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")
# Without a limit, an unsure model may produce white space up to the last token.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{0,32}"}
_MAX_CACHED = 64  # compiled grammars
_MISSING = "needs the package llguidance where the model is served: pip install llguidance"


@dataclass(frozen=True)
class TokenTexts:
    """A model's tokens: the bytes of each, the ids that are not text, and the encoder of text."""

    pieces: Sequence[bytes]
    special_ids: Sequence[int]
    encode: Callable[[str], list[int]]


def compiled(structure: Mapping[str, Any]) -> str:
    """Return llguidance's grammar of a structure, a mapping with one of the keys `STRUCTURES`.

    Raises ValueError if it is invalid, or if llguidance is not installed.
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
    """The tokens that may come next in one row; not thread-safe."""

    def __init__(self, matcher: Any, size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        self._bits = np.zeros(-(-size // 32), np.int32)
        self._filled = self._begin()

    @property
    def problem(self) -> str:
        """The reason why no token can follow, or "": a grammar may exceed llguidance's limits."""
        if not (reason := str(self._matcher.get_error())):
            return ""
        # Further lines hold the parser's state.
        return f"no token can follow in the requested grammar: {reason.splitlines()[0][:400]}"

    def mask(self) -> Array:
        """Return a bit mask of the tokens that may come next, lowest bit first, (X / 8,) uint8."""
        self._filled.result()
        return self._bits.view(np.uint8) * np.uint8(not self._matcher.is_error())

    def take(self, token: int) -> bool:
        """Take the row's next token; return whether the grammar is complete."""
        self._filled.result()
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return False  # `mask` is then empty, which fails the row
        is_complete = bool(self._matcher.is_stopped())
        if not is_complete:
            self._filled = self._begin()
        return is_complete

    def _begin(self) -> "Future[None]":
        return self._threads.submit(self._fill)

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)


class Grammars:
    """Constraints for one model, whose tokens are read before the first one is made."""

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
        # Placeholders for ids beyond the tokenizer's and for tokens without bytes, which no grammar
        # allows.
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
        """Return the initial matcher of a structure; callers copy it."""
        value = json.loads(structure)
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        if not self._end_ids:
            raise ValueError("the model has no end token in its vocabulary")
        matcher = _library().LLMatcher(self._tokenizer, compiled(value))
        if matcher.is_error():
            raise ValueError(str(matcher.get_error())[:400])
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise ValueError("no text matches this grammar; does a rule need itself?")
        return matcher
