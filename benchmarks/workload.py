"""The requests of the throughput benchmarks: every contender gets the same lengths and ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted; no end token stops it earlier."""

    prompt: list[int]
    output_len: int


def random_requests(
    count: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    vocab_size: int,
    shared_len: int = 0,
    seed: int = 7,
) -> list[Request]:
    """Return requests whose tokens in and out lie between two numbers each.

    Each begins with the same `shared_len` tokens, which are not counted among those of `inputs`.
    """
    draw = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [draw.randrange(1, vocab_size) for _ in range(length)]

    shared = ids(shared_len)
    return [
        Request(shared + ids(draw.randint(*inputs)), draw.randint(*outputs)) for _ in range(count)
    ]


def arrival_times(count: int, *, rate: float, seed: int = 11) -> list[float]:
    """Return arrival times in seconds: independent, `rate` requests per second."""
    draw = random.Random(seed)
    return list(accumulate(draw.expovariate(rate) for _ in range(count)))
