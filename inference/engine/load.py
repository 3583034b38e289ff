"""The load of an engine and the times of its requests, for whoever watches it."""

from dataclasses import dataclass, field
from time import perf_counter


@dataclass
class RequestTimes:
    """The moments of one request, in seconds of `perf_counter`; None for what has not happened.

    `steps` counts the steps that gave it tokens. Tokens and reasons are known once it has ended.
    """

    arrived: float = field(default_factory=perf_counter)
    began: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    steps: int = 0
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    reasons: tuple[str, ...] = ()  # why each of its sequences has ended

    def note_token(self, at: float) -> None:
        """Note that a step has given the request a token."""
        if self.last_token == at:
            return  # another row of the request has counted this step
        self.first_token = self.first_token or at
        self.last_token = at
        self.steps += 1

    @property
    def queued_s(self) -> float | None:
        """Time until the first sequence held a slot."""
        return _between(self.arrived, self.began)

    @property
    def first_token_s(self) -> float | None:
        """Time until the first token."""
        return _between(self.arrived, self.first_token)

    @property
    def prefill_s(self) -> float | None:
        """Time from the first slot to the first token: that of the prompts."""
        return _between(self.began, self.first_token)

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last."""
        return _between(self.first_token, self.last_token)

    @property
    def between_tokens_s(self) -> float | None:
        """Mean time between two steps that gave it tokens."""
        return None if self.decode_s is None or self.steps < 2 else self.decode_s / (self.steps - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine at one moment, and its sums since the start.

    Attributes:
        waiting, running: sequences; a beam search runs one for each beam.
        slots: most sequences that can run.
        blocks, blocks_used: of the cache, with reserved ones; 0 where each slot has its own.
        prompt_tokens: of all prompts that were begun, those of encoders included.
        shared_tokens: of the prompts, those that earlier sequences had left in the cache.
        generated_tokens: of all answers, finished or not; a token of each beam counts.
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
