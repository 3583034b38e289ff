"""Answers on their way to the client: text, its end, and log probabilities, as OpenAI has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from inference.openai.codec import Codec
from inference.openai.generation import Candidate, PlaceScore

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ScoredToken:
    """One token of a text: its piece of it, where that begins and ends, and its scores."""

    index: int
    piece: str
    first: int
    last: int
    place: PlaceScore | None
    names: tuple[tuple[str, float], ...]  # of the best tokens

    @property
    def log_prob(self) -> float | None:
        """None for the first token of a text."""
        return None if self.place is None else self.place.log_prob


@dataclass
class Answer:
    """One choice, which grows with each frame of the model.

    Attributes:
        prompt: tokens before it.
        limit: tokens after which it ends.
        stops: texts that end it.
        best: best tokens to report in each place; None to report none.
        text: what may be sent; what could become one of the stops is held back.
        tokens: generated tokens that count, the end token included.
    """

    codec: Codec
    prompt: Sequence[int]
    limit: int
    stops: Sequence[str] = ()
    end_ids: frozenset[int] = frozenset()
    best: int | None = None
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None
    scored: list[ScoredToken] = field(default_factory=list)
    cum_log_prob: float = 0.0

    def update(self, candidate: Candidate, *, final: bool) -> None:
        """Take in what the model has generated so far, or, if `final`, in all."""
        if self.finish_reason is not None:
            return
        ids = candidate.ids[: self.limit]
        end = next((number for number, each in enumerate(ids) if each in self.end_ids), None)
        is_ended = end is not None
        shown = ids if end is None else ids[:end]
        self.tokens = len(shown) + is_ended
        self.cum_log_prob = candidate.cum_log_prob
        more = not (final or is_ended or len(ids) == self.limit)
        text = self.codec.text_after(self.prompt, shown, partial=more)
        found = ((at, len(each)) for each in self.stops if (at := text.find(each)) >= 0)
        stop, length = min(found, default=(None, 0))
        if stop is not None:
            text = text[:stop]
        elif more:
            text = text[: len(text) - _held_back(text, self.stops)]
        self.text = text
        if self.best is not None:
            self._score(candidate, ids[: self.tokens])
        if stop is not None:
            self._cut(stop)
            self.tokens = self._tokens_of(shown, stop + length)
            self.finish_reason = "stop"
        elif not more:
            # The model ends short of the limit only at an end token or a stop word.
            is_short = is_ended or len(ids) < self.limit
            self.finish_reason = "stop" if is_short else "length"

    def _score(self, candidate: Candidate, ids: Sequence[int]) -> None:
        assert self.best is not None
        before = [*self.prompt[-8:], *ids[: len(self.scored)]]
        at = self.scored[-1].last if self.scored else 0
        for number in range(len(self.scored), len(ids)):
            place = candidate.place(len(self.prompt) + number, best=self.best)
            token = scored_token(self.codec, before, ids[number], place, at, shown=self.end_ids)
            self.scored.append(token)
            before.append(ids[number])
            at = token.last

    def _tokens_of(self, ids: Sequence[int], length: int) -> int:
        """Return how many of an answer's tokens make so many characters of its text."""

        def reaches(count: int) -> bool:
            return len(self.codec.text_after(self.prompt, ids[:count], partial=True)) >= length

        return bisect_left(range(len(ids)), True, key=reaches)

    def _cut(self, length: int) -> None:
        """Drop the tokens of a text that is not part of the answer."""
        if self.best is not None:
            self.scored = [token for token in self.scored if token.first < length]


def scored_token(
    codec: Codec,
    before: Sequence[int],
    index: int,
    place: PlaceScore | None,
    at: int,
    *,
    shown: frozenset[int] = frozenset(),
) -> ScoredToken:
    """Return a token that begins at character `at`; those in `shown` add nothing to the text."""
    piece = codec.piece(before, index)
    pairs = () if place is None else place.top
    names = tuple((codec.name(before, each), score) for each, score in pairs)
    last = at if index in shown else at + len(piece)
    return ScoredToken(index, piece, at, last, place, names)


def score_prompt(codec: Codec, prompt: Sequence[int], candidate: Candidate, best: int) -> list[
    ScoredToken
]:  # fmt: skip
    """Return the tokens of a prompt with their scores; the first has none."""
    found: list[ScoredToken] = []
    for number, index in enumerate(prompt):
        place = candidate.place(number, best=best) if number else None
        at = found[-1].last if found else 0
        found.append(scored_token(codec, prompt[:number], index, place, at))
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
    if token.place is None:
        return None
    found: dict[str, float] = {}
    for name, score in (*token.names, (token.piece, token.place.log_prob)):
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


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a stop."""
    lengths = (
        length
        for stop in stops
        for length in range(min(len(stop) - 1, len(text)), 0, -1)
        if text.endswith(stop[:length])
    )
    return max(lengths, default=0)
