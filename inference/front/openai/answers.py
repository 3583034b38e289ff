"""Incremental answer text, finish reason and log probabilities in OpenAI's format."""

# Shapes: A answer, L prompt and answer, W best tokens of a place

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from inference.backend.tokenizer import REPLACEMENT
from inference.front.openai.codec import WINDOW, Codec

_MOST_PENDING = 16  # tokens that are held back for a character that does not end
Array = np.ndarray[Any, np.dtype[Any]]
Place = tuple[float | None, tuple[tuple[int, float], ...]]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Candidate:
    """One candidate, as far as it has grown; its scores are those of prompt and answer."""

    ids: Sequence[int]  # generated tokens, an end token included
    own: Array | None = None  # (L,)
    top_ids: Array | None = None  # (L, W)
    top: Array | None = None  # (L, W)
    cum_log_prob: float = 0.0  # of the whole answer, where it was asked for

    def place(self, index: int, *, best: int) -> Place:
        """Return the log probability of the token in a place, and the best tokens there."""
        if self.own is None or self.top_ids is None or self.top is None:
            return None, ()
        tops = (each[index, :best].tolist() for each in (self.top_ids, self.top))
        return float(self.own[index]), tuple(zip(*tops, strict=True))


@dataclass(frozen=True)
class ScoredToken:
    """One token of a text: its piece of it, where that begins and ends, and its scores."""

    index: int
    piece: str
    first: int
    last: int
    log_prob: float | None  # None for the first token of a text
    names: tuple[tuple[str, float], ...]  # of the best tokens


class Answer:
    """One choice, which grows with each frame of the model.

    It follows the tokens of `prompt`, and ends after `limit` tokens, at one of the texts in `stops`
    or of the tokens in `end_ids`. `best` is the number of best tokens to report in each place, None
    to report none.

    Attributes:
        text: what may be sent; what could become one of the stops is held back.
        tokens: number of generated tokens that count, the end token included.
        finish_reason: None while it grows.
        has_begun: whether a chunk of it was sent.
    """

    def __init__(
        self,
        codec: Codec,
        prompt: Sequence[int],
        limit: int,
        stops: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        best: int | None = None,
    ) -> None:
        self._codec, self._prompt, self._limit, self._best = codec, prompt, limit, best
        self._stops, self._end_ids = stops, end_ids
        self._longest_stop = max(map(len, stops), default=0)
        self._whole = ""  # with what is held back
        self._decoded = 0  # number of tokens whose text it has
        self._ids: list[int] = []  # without the end token
        self.text = ""
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self.scored: list[ScoredToken] = []
        self.cum_log_prob = 0.0
        self.has_begun = self._is_sent = False
        self._sent_characters = self._sent_tokens = 0

    def update(self, candidate: Candidate, *, final: bool) -> None:
        """Take in what the model has generated so far, or, if `final`, in all."""
        if self.finish_reason is not None:
            return
        new = candidate.ids[self.tokens : self._limit]
        end = next((number for number, each in enumerate(new) if each in self._end_ids), None)
        is_ended, shown = end is not None, new[:end]
        self._ids += shown
        self.tokens += len(shown) + is_ended
        self.cum_log_prob = candidate.cum_log_prob
        more = not (final or is_ended or self.tokens == self._limit)
        if self._best is not None:
            self._score(candidate, new[: len(shown) + is_ended])
        searched = max(len(self._whole) - self._longest_stop + 1, 0)
        self._whole += self._new_text(more=more)
        text = self._whole
        found = ((at, len(s)) for s in self._stops if (at := text.find(s, searched)) >= 0)
        stop, length = min(found, default=(None, 0))
        if stop is not None:
            self.text = text[:stop]
            self.scored = [token for token in self.scored if token.first < stop]
            self.tokens = self._tokens_of(stop + length)
            self.finish_reason = "stop"
        elif more:
            held_back = max((_beginning(text, stop) for stop in self._stops), default=0)
            self.text = text[: len(text) - held_back]
        else:
            self.text = text
            # The model ends short of the limit only at an end token or a stop word.
            is_short = is_ended or self.tokens < self._limit
            self.finish_reason = "stop" if is_short else "length"

    def unsent(self) -> tuple[str, list[ScoredToken]] | None:
        """Return the text and the tokens to send in a chunk now, None if there is nothing."""
        is_last = self.finish_reason is not None
        if self._is_sent or not (self.tokens or is_last):
            return None
        text = self.text[self._sent_characters :]
        # A token goes with the text that it ends in; what is held back may never be sent.
        rest = self.scored[self._sent_tokens :]
        ready = [*takewhile(lambda token: is_last or token.last <= len(self.text), rest)]
        if not (text or ready or is_last) and self.has_begun:
            return None
        self._sent_characters += len(text)
        self._sent_tokens += len(ready)
        self.has_begun, self._is_sent = True, is_last
        return text, ready

    def _new_text(self, *, more: bool) -> str:
        """Return the text that is sure now; with `more`, other tokens will follow.

        Each is decoded once. The prompt's tokens decide about the first space.
        """
        if not (pending := self._ids[self._decoded :]):
            return ""
        start = max(self._decoded - WINDOW, 0)
        before = [*self._prompt[-WINDOW:], *self._ids[start : self._decoded]]
        text = self._codec.text_after(before, pending)
        if more and text.endswith(REPLACEMENT) and len(pending) < _MOST_PENDING:
            return ""
        self._decoded = len(self._ids)
        return text

    def _score(self, candidate: Candidate, new: Sequence[int]) -> None:
        assert self._best is not None
        count = len(self.scored)
        before = [*self._prompt[-WINDOW:], *(token.index for token in self.scored[-WINDOW:])]
        at = self.scored[-1].last if self.scored else 0
        for number, index in enumerate(new, count):
            place = candidate.place(len(self._prompt) + number, best=self._best)
            token = scored_token(self._codec, before, index, place, at, shown=self._end_ids)
            self.scored.append(token)
            before.append(index)
            at = token.last

    def _tokens_of(self, length: int) -> int:
        def reaches(count: int) -> bool:
            return len(self._codec.text_after(self._prompt, self._ids[:count])) >= length

        return bisect_left(range(len(self._ids)), True, key=reaches)


def scored_token(
    codec: Codec,
    before: Sequence[int],
    index: int,
    place: Place,
    at: int,
    *,
    shown: frozenset[int] = frozenset(),
) -> ScoredToken:
    """Return a token that begins at character `at`; those in `shown` add nothing to the text."""
    piece = codec.piece(before, index)
    log_prob, top = place
    names = tuple((codec.name(before, each), score) for each, score in top)
    last = at if index in shown else at + len(piece)
    return ScoredToken(index, piece, at, last, log_prob, names)


def score_prompt(
    codec: Codec, prompt: Sequence[int], candidate: Candidate, best: int
) -> list[ScoredToken]:
    """Return the tokens of a prompt with their scores; the first has none."""
    found: list[ScoredToken] = []
    for number, index in enumerate(prompt):
        place = candidate.place(number, best=best) if number else (None, ())
        at = found[-1].last if found else 0
        found.append(
            scored_token(codec, prompt[max(number - WINDOW, 0) : number], index, place, at)
        )
    return found


def completion_log_probs(tokens: Sequence[ScoredToken], *, offset: int = 0) -> dict[str, Any]:
    """Return the `logprobs` of a completion; its text begins at character `offset`."""
    return {
        "tokens": [token.piece for token in tokens],
        "token_logprobs": [token.log_prob for token in tokens],
        "top_logprobs": [_by_name(token) for token in tokens],
        "text_offset": [offset + token.first for token in tokens],
    }


def _by_name(token: ScoredToken) -> dict[str, float] | None:
    """Return the best tokens by name, and the token itself; of equal names the likelier counts."""
    if token.log_prob is None:
        return None
    found: dict[str, float] = {}
    for name, score in (*token.names, (token.piece, token.log_prob)):
        found.setdefault(name, score)
    return found


def chat_log_probs(tokens: Sequence[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's answer."""
    content = [
        {
            **_chat_token(token.piece, token.log_prob),
            "top_logprobs": [_chat_token(name, score) for name, score in token.names],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(piece: str, score: float | None) -> dict[str, Any]:
    return {"token": piece, "logprob": score, "bytes": list(piece.encode())}


def _beginning(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
