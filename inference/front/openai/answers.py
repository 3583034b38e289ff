"""Incremental answer text, finish reason and log probabilities in OpenAI's format."""

# Shapes: A answer, L prompt and answer, W top tokens per position

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from inference.backend.tokenizer import REPLACEMENT
from inference.front.openai.codec import WINDOW, Codec

_MAX_WINDOWS = 3  # length of the context that is decoded again with new tokens, in WINDOWs
_MAX_PENDING = 16  # tokens to hold back while a character is incomplete
Array = np.ndarray[Any, np.dtype[Any]]
TokenLogProbs = tuple[float | None, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class Candidate:
    """One candidate so far; its scores cover prompt and answer."""

    ids: Sequence[int]  # generated tokens, including an end token
    log_probs: Array | None = None  # (L,)
    top_ids: Array | None = None  # (L, W)
    top_log_probs: Array | None = None  # (L, W)

    def scores_at(self, index: int, *, top_n: int) -> TokenLogProbs:
        """Return the log probability of the token at a position, and the top tokens there."""
        if self.log_probs is None or self.top_ids is None or self.top_log_probs is None:
            return None, ()
        tops = (values[index, :top_n].tolist() for values in (self.top_ids, self.top_log_probs))
        return float(self.log_probs[index]), tuple(zip(*tops, strict=True))


@dataclass(frozen=True)
class ScoredToken:
    """One token of a text, with its piece of the text and its scores."""

    index: int  # token id
    piece: str
    first: int  # character at which the piece begins
    last: int  # character after its end
    log_prob: float | None  # None for the first token of a text
    names: tuple[tuple[str, float], ...]  # text and log probability of each top token
    top_ids: tuple[int, ...] = ()  # ids of the top tokens


@dataclass(eq=False)
class Answer:
    """One choice, which grows with each frame of the model and continues the tokens of `prompt`."""

    codec: Codec
    prompt: Sequence[int]
    limit: int  # maximum number of tokens
    stops: Sequence[str] = ()  # texts that end it
    end_ids: frozenset[int] = frozenset()  # tokens that end it
    top_n: int | None = None  # number of top tokens to report per position, None for no scores
    shows_special: bool = False  # include special tokens in the text
    min_tokens: int = 0  # no stop text ends within as many tokens
    text: str = field(default="", init=False)  # without an end that may become a stop text
    tokens: int = field(default=0, init=False)  # tokens so far, including the end token
    finish_reason: Literal["stop", "length", None] = field(default=None, init=False)
    scored: list[ScoredToken] = field(default_factory=list, init=False)
    has_begun: bool = field(default=False, init=False)  # a chunk was sent

    def __post_init__(self) -> None:
        self._whole = ""  # the text including what is held back
        self._decoded = 0  # number of tokens in `_whole`
        self._ids: list[int] = []  # without the end token
        self.end_id: int | None = None  # the end token that ended it
        # Context for decoding the next tokens: the tokens before them, and their text.
        self._window = self._shown(self.prompt[-WINDOW:])
        self._start: str | None = None
        self._is_sent = False
        self._sent_characters = self._sent_tokens = self._sent_ids = 0

    def update(self, candidate: Candidate, *, final: bool) -> None:
        """Add the tokens that are new in `candidate`; `final` says that it is complete."""
        if self.finish_reason is not None:
            return
        new = candidate.ids[self.tokens : self.limit]
        ends = (number for number, token in enumerate(new) if token in self.end_ids)
        end = next(ends, None)
        is_ended, shown = end is not None, new[:end]
        self._ids += shown
        self.tokens += len(shown) + is_ended
        self.end_id = None if end is None else new[end]
        more = not (final or is_ended or self.tokens == self.limit)
        if self.top_n is not None:
            first = len(self.prompt) + len(self.scored)
            counted = new[: len(shown) + is_ended]
            self.scored += scored_tokens(
                self.codec,
                [*self.prompt[-WINDOW:], *(token.index for token in self.scored[-WINDOW:])],
                counted,
                (candidate.scores_at(first + n, top_n=self.top_n) for n in range(len(counted))),
                at=self.scored[-1].last if self.scored else 0,
                shown=self.end_ids,
            )
        before = len(self._whole)
        self._whole = text = self._whole + self._new_text(more=more)
        stop = None
        if self.stops and self.tokens > self.min_tokens:
            soonest = 1 + max(before, self._free)  # end of a stop text that is not known yet
            firsts = ((s, max(soonest - len(s), 0)) for s in self.stops)
            found = ((at + len(s), at) for s, first in firsts if (at := text.find(s, first)) >= 0)
            # The one that is complete first, however many tokens come at once.
            stop_end, stop = min(found, default=(0, None))
        if stop is not None:
            self.text = text[:stop]
            self.scored = [token for token in self.scored if token.first < stop]
            self.tokens = bisect_left(
                range(len(self._ids)),
                stop_end,
                key=lambda count: len(self._text_of(self._ids[:count])),
            )
            self.finish_reason = "stop"
        elif more:
            held_back = max((_beginning(text, stop) for stop in self.stops), default=0)
            self.text = text[: len(text) - held_back] if held_back else text
        else:
            self.text = text
            # Below the limit, a model ends only at an end token or a stop word.
            is_short = is_ended or self.tokens < self.limit
            self.finish_reason = "stop" if is_short else "length"

    @cached_property
    def _free(self) -> int:
        """Characters of its first `min_tokens` tokens."""
        return len(self._text_of(self._ids[: self.min_tokens]))

    def _shown(self, ids: Sequence[int]) -> list[int]:
        return self.codec.shown(ids, special=self.shows_special)

    def _text_of(self, ids: Sequence[int]) -> str:
        before = self._shown(self.prompt[-WINDOW:])
        start = self.codec.tokenizer.decode(before)
        return self.codec.extended(before, start, self._shown(ids))[1]

    def unsent(self) -> tuple[str, list[ScoredToken], list[int]] | None:
        """Return the new text, scored tokens and token ids for a chunk, None if there are none."""
        is_last = self.finish_reason is not None
        if self._is_sent or not (self.tokens or is_last):
            return None
        text = self.text[self._sent_characters :]
        # A token is sent with the end of its text, or of the character that it begins; text that is
        # held back may never be sent.
        rest, end = self.scored[self._sent_tokens :], len(self.text)
        ready = [*takewhile(lambda t: is_last or t.last < end + bool(t.piece), rest)]
        if not (text or ready or is_last) and self.has_begun:
            return None
        self._sent_characters += len(text)
        self._sent_tokens += len(ready)
        # Tokens without text yet may turn out to follow a stop text.
        ids = self._ids[self._sent_ids : self._decoded]
        if is_last:
            end_ids = [] if self.end_id is None else [self.end_id]
            ids = [*self._ids, *end_ids][self._sent_ids : self.tokens]
        self._sent_ids += len(ids)
        self.has_begun, self._is_sent = True, is_last
        return text, ready, ids

    def _new_text(self, *, more: bool) -> str:
        """Return the text of tokens that are not decoded yet; with `more`, others will follow.

        With `more`, an incomplete character is held back. The prompt's tokens decide whether the
        text begins with a space.
        """
        if not (pending := self._ids[self._decoded :]):
            return ""
        if self._start is None or len(self._window) > _MAX_WINDOWS * WINDOW:
            self._window = self._window[-WINDOW:]
            self._start = self.codec.tokenizer.decode(self._window)
        shown = self._shown(pending)
        whole, text = self.codec.extended(self._window, self._start, shown)
        if more and text.endswith(REPLACEMENT) and len(pending) < _MAX_PENDING:
            return ""
        self._decoded = len(self._ids)
        self._window += shown
        self._start = whole
        return text


def scored_tokens(
    codec: Codec,
    before: Sequence[int],
    ids: Iterable[int],
    scores: Iterable[TokenLogProbs],
    *,
    at: int = 0,
    shown: frozenset[int] = frozenset(),
) -> Iterator[ScoredToken]:
    """Yield the tokens `ids`, which follow the tokens `before`, with their scores.

    The first begins at character `at`; tokens in `shown` add nothing to the text.
    """
    before = list(before[-WINDOW:])
    for index, (log_prob, top) in zip(ids, scores, strict=True):
        piece = codec.piece(before, index)
        names = tuple((codec.name(before, token), score) for token, score in top)
        last = at if index in shown else at + len(piece)
        top_ids = tuple(token for token, _ in top)
        yield ScoredToken(index, piece, at, last, log_prob, names, top_ids)
        before.append(index)
        at = last


def completion_log_probs(tokens: Sequence[ScoredToken], *, offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` of a completion; its text begins at character `offset`."""
    return {
        "tokens": [token.piece for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": [_by_name(token) for token in tokens],
        "text_offset": [offset + token.first for token in tokens],
    }


def _by_name(token: ScoredToken) -> dict[str, float] | None:
    """Return the top tokens and the token itself by text; of equal texts the likelier one."""
    if token.log_prob is None:
        return None
    found: dict[str, float] = {}
    for name, score in (*token.names, (token.piece, token.log_prob)):
        found.setdefault(name, score)
    return found


def chat_log_probs(tokens: Sequence[ScoredToken], codec: Codec) -> dict[str, Any]:
    """Return the `logprobs` of a chat's answer."""

    def described(index: int, piece: str, score: float | None) -> dict[str, Any]:
        return {"token": piece, "logprob": score, "bytes": [*codec.bytes_of(index, piece)]}

    content = [
        {
            **described(token.index, token.piece, token.log_prob),
            "top_logprobs": [
                described(index, *named)
                for index, named in zip(token.top_ids, token.names, strict=True)
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_log_probs(tokens: Sequence[ScoredToken]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`; the rank is null for a token that is not a top token."""
    found = []
    for token in tokens:
        entries: dict[str, dict[str, Any]] = {
            str(index): {"logprob": score, "rank": rank, "decoded_token": name}
            for rank, (index, (name, score)) in enumerate(
                zip(token.top_ids, token.names, strict=True), 1
            )
        }
        own = {"logprob": token.log_prob, "rank": None, "decoded_token": token.piece}
        entries.setdefault(str(token.index), own)
        found.append(None if token.log_prob is None else entries)
    return found


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
