"""The sampler's contract: the parameters by which a token is chosen from a row of logits.

The host (`processors`, `sampling`) and the GPU kernel of a rank (`inference.model.gpu.choice`)
process the logits x in this order, in fp32:

1. x + bias, for ids with a bias: `logit_bias`, minus the frequency penalty for each occurrence of
   the id in the answer; -inf for a banned id
2. x * factor, by the temperature; beam search divides
3. x * repetition if x < 0, else x / repetition, then - presence, for the ids seen in prompt and
   answer
4. the lowest finite number, for the end id before `min_length` tokens

Source: FasterTransformer 5.3 for steps 2 to 4; OpenAI's API reference for bias and frequency.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inference.decoding.sampling_params import SamplingParams
from inference.decoding.tensor_fields import Array


class DrawParameters(NamedTuple):
    """The parameters of one draw by a rank; fp32 represents all but `rest` exactly.

    Attributes:
        factor: Multiplies the logits.
        top_k: Number of best tokens that can be drawn, 0 for all.
        top_p: Share of these tokens' mass that can be drawn.
        rest: Added to their mass before the share is taken.
        whole_boundary: 1 if the token at the nucleus boundary keeps its whole mass, else 0.
        uniform: Random number in (0, 1].
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
    """The penalties of one choice by a rank; `repetition` is 0 for a slot without marks.

    `frequency` is subtracted from the bias of the chosen id.
    """

    repetition: float
    presence: float
    frequency: float


UNMARKED = Penalty(0, 0, 0)


class TokenMarks(NamedTuple):
    """The ids `seen` by a row, and the ids with a bias and their summed `bias` (fp32)."""

    seen: Array
    ids: Array
    bias: Array


NO_IDS = np.empty(0, np.int64)
NO_BIAS = np.empty(0, np.float32)
NO_MARKS = TokenMarks(NO_IDS, NO_IDS, NO_BIAS)


def prompt_ids(context_ids: Sequence[int], vocab_size: int) -> Array:
    """Return the distinct ids of a prompt that penalties apply to, without virtual tokens."""
    ids = np.unique(np.asarray(context_ids, np.int64))
    return ids[ids < vocab_size]


def biases(params: SamplingParams, answer: Sequence[int]) -> tuple[Array, Array]:
    """Return the ids with a bias after the tokens of an answer, and the biases (fp32).

    The frequency penalty is subtracted token by token, as ranks do, for the same rounding.
    """
    if not params.is_biased:
        return NO_IDS, NO_BIAS
    explicit = dict(params.logit_bias)
    tokens = [*explicit, *(answer if params.frequency_penalty else ())]
    ids, indices = np.unique(np.array(tokens, np.int64), return_inverse=True)
    bias = np.zeros(len(ids), np.float32)
    bias[indices[: len(explicit)]] = list(explicit.values())
    np.subtract.at(bias, indices[len(explicit) :], np.float32(params.frequency_penalty))
    return ids, bias


class Xorwow:
    """The random generator of a row: an independent stream of 32-bit words, as from cuRAND.

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
        # Product and sum are exact in double precision, so only the conversions round.
        return float(np.float32(float(np.float32(self.word())) * 2.0**-32 + 2.0**-33))
