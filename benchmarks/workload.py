"""The requests of the throughput benchmarks: every contender gets the same lengths and ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are wanted; no end token stops it earlier."""

    prompt: list[int]
    output_len: int


def equal_requests(
    count: int, *, input_len: int, output_len: int, vocab_size: int, seed: int = 3
) -> list[Request]:
    """Return requests of one length."""
    draw = random.Random(seed + count)
    return [Request(_prompt(draw, input_len, vocab_size), output_len) for _ in range(count)]


def mixed_requests(
    count: int,
    *,
    vocab_size: int,
    inputs: Sequence[int] = (32, 512),
    outputs: Sequence[int] = (16, 256),
    seed: int = 7,
) -> list[Request]:
    """Return requests whose tokens in and out lie between two numbers each."""
    draw = random.Random(seed)
    return [
        Request(_prompt(draw, draw.randint(*inputs), vocab_size), draw.randint(*outputs))
        for _ in range(count)
    ]


def shared_requests(
    count: int, *, shared_len: int, input_len: int, output_len: int, vocab_size: int
) -> list[Request]:
    """Return requests of one length that begin with the same tokens."""
    shared = _prompt(random.Random(5), shared_len, vocab_size)
    sizes = {"input_len": input_len, "output_len": output_len, "vocab_size": vocab_size}
    own = equal_requests(count, **sizes)
    return [Request(shared + each.prompt, output_len) for each in own]


def arrival_times(count: int, *, rate: float, seed: int = 11) -> list[float]:
    """Return arrival times in seconds: independent, `rate` requests per second."""
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def _prompt(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return [draw.randrange(1, vocab_size) for _ in range(length)]
