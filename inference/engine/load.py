"""The load of an engine and the timing of its requests, for metrics."""

from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class RequestTimes:
    """Timestamps of one request, in `perf_counter` seconds; None until the event.

    `steps` counts the steps that produced its tokens. Token counts and reasons are set at its end.
    """

    arrived: float = field(default_factory=perf_counter)
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    steps: int = 0
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    reasons: tuple[str, ...] = ()  # finish reason of each sequence

    def note_token(self, at: float) -> None:
        """Record that a step has produced a token for the request."""
        if self.last_token == at:
            return  # already counted for another row of the request
        self.first_token = self.first_token or at
        self.last_token = at
        self.steps += 1

    @property
    def queued_s(self) -> float | None:
        """Time until the first sequence got a slot."""
        return _between(self.arrived, self.began)

    @property
    def first_token_s(self) -> float | None:
        """Time until the first token."""
        return _between(self.arrived, self.first_token)

    @property
    def prefill_s(self) -> float | None:
        """Time from the first slot to the first token, spent on the prompts."""
        return _between(self.began, self.first_token)

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        return _between(self.first_token, self.last_token)

    @property
    def between_tokens_s(self) -> float | None:
        """Mean time between steps that produced its tokens."""
        return None if self.decode_s is None or self.steps < 2 else self.decode_s / (self.steps - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine at one moment, and its totals since the start.

    Attributes:
        waiting, running: Sequences; a running beam search counts one per beam.
        slots: Most sequences that can run.
        blocks, blocks_used: Of the cache; reserved blocks count as used. 0 without paging.
        prompt_tokens: Tokens of all prompts begun so far, encoder inputs included.
        shared_tokens: Prompt tokens found in the cache, computed for other sequences.
        generated_tokens: Tokens of all answers, finished or not, counted for each beam.
    """

    waiting: int = 0
    running: int = 0
    slots: int = 0
    blocks: int = 0
    blocks_used: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0

    @property
    def cache_share(self) -> float:
        """The share of the cache that sequences hold, from 0 to 1."""
        if self.blocks:
            return self.blocks_used / self.blocks
        return self.running / self.slots if self.slots else 0.0
