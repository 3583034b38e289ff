"""The sampler's contract: the numbers by which a token is chosen from a row of logits.

The host (`processors`, `sampling`) and the GPU kernel of a rank (`inference.model.gpu.choice`)
change the logits x in this order, in fp32:

1. x + bias, for the ids that have one: `logit_bias`, less the frequency penalty for each time that
   the answer has the id; minus infinity for a banned id
2. x * factor, by the temperature; beam search divides
3. x * repetition below zero, else x / repetition, and then - presence, for the ids that are seen:
   those of prompt and answer
4. the lowest finite number, for the end id before `min_length` tokens

Source: FasterTransformer 5.3 for steps 2 to 4; OpenAI's API reference for bias and frequency.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inference.decoding.sampling_params import SamplingParams
from inference.decoding.tensor_fields import Array


class DrawParameters(NamedTuple):
    """The parameters of one draw by a rank; fp32 holds each of them exactly, but `rest`.

    Attributes:
        factor: Multiplies the logits.
        top_k: How many of the best tokens can be drawn, 0 for all.
        top_p: The share of these tokens' mass that can be drawn.
        rest: Mass that is added to theirs before the share is taken.
        whole_boundary: 1 if the token at the nucleus boundary keeps its whole mass, else 0.
        uniform: The random number, in (0, 1].
    """

    factor: float
    top_k: float
    top_p: float
    rest: float
    whole_boundary: float
    uniform: float


ARG_MAX = DrawParameters(1, 1, 1, 0, 0, 1)
_MASK = 0xFFFFFFFF


class Penalty(NamedTuple):
    """The penalties of one choice by a rank; `repetition` is 0 if the row's slot has no marks.

    `frequency` is subtracted from the bias of the id that is chosen.
    """

    repetition: float
    presence: float
    frequency: float


UNMARKED = Penalty(0, 0, 0)


class TokenMarks(NamedTuple):
    """The ids that a row has seen, and the ids with a bias and the sum of their biases (fp32)."""

    seen: Array
    ids: Array
    bias: Array


NO_IDS = np.empty(0, np.int64)
NO_BIAS = np.empty(0, np.float32)
NO_MARKS = TokenMarks(NO_IDS, NO_IDS, NO_BIAS)


def prompt_ids(context_ids: Sequence[int], vocab_size: int) -> Array:
    """Return the ids of a prompt that a penalty acts on: each once, no virtual ones."""
    ids = np.unique(np.asarray(context_ids, np.int64))
    return ids[ids < vocab_size]


def biases(params: SamplingParams, answer: Sequence[int]) -> tuple[Array, Array]:
    """Return the ids with a bias after the tokens of an answer, and the biases (fp32).

    The frequency penalty is subtracted once for each token, as ranks do: the sums round alike.
    """
    if not params.is_biased:
        return NO_IDS, NO_BIAS
    given = dict(params.logit_bias)
    tokens = [*given, *(answer if params.frequency_penalty else ())]
    ids, places = np.unique(np.array(tokens, np.int64), return_inverse=True)
    bias = np.zeros(len(ids), np.float32)
    bias[places[: len(given)]] = list(given.values())
    np.subtract.at(bias, places[len(given) :], np.float32(params.frequency_penalty))
    return ids, bias


class Xorwow:
    """The generator of a row: one independent stream of 32-bit words, as cuRAND makes them.

    Source: G. Marsaglia, "Xorshift RNGs", 2003, section 3.1, with the seeding of NVIDIA's
    `curand_kernel.h`, which FasterTransformer calls as `curand_init(seed, 0, 0, state)`.
    """

    __slots__ = ("_counter", "_words")

    def __init__(self, seed: int) -> None:
        low = ((seed & _MASK) ^ 0xAAD26B49) * 1099087573 & _MASK
        high = ((seed >> 32 & _MASK) ^ 0xF7DCEFDD) * 2591861531 & _MASK
        self._counter = 6615241 + low + high & _MASK
        self._words = (
            123456789 + low & _MASK,
            362436069 ^ low,
            521288629 + high & _MASK,
            88675123 ^ high,
            5783321 + low & _MASK,
        )

    def word(self) -> int:
        """Return the next unsigned 32-bit number."""
        first, *rest = self._words
        last = rest[-1]
        mixed = first ^ first >> 2
        new = (last ^ last << 4) ^ (mixed ^ mixed << 1)
        new &= _MASK
        self._words = (rest[0], rest[1], rest[2], last, new)
        self._counter = self._counter + 362437 & _MASK
        return new + self._counter & _MASK

    def uniform(self) -> float:
        """Return the next number in (0, 1], rounded as in FP32 arithmetic."""
        # The product is exact and the double sum too, so only the conversions round.
        return float(np.float32(float(np.float32(self.word())) * 2.0**-32 + 2.0**-33))
