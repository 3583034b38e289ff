"""Generation as the endpoint asks for it: a prompt, tensors of the serving contract, and frames."""

# Shapes: n candidates, A answer, L prompt and answer, W best tokens of a place

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Place = tuple[float | None, tuple[tuple[int, float], ...]]


@dataclass(frozen=True)
class ModelFacts:
    """A served model.

    Attributes:
        inputs: names of the tensors it takes.
        max_rows: most candidates of a request.
        context_len: most tokens of prompt and answer together, as far as the files say.
        vocab_size: number of tokens; None where the files do not say.
        encoder_decoder: the prompt is not part of what it returns.
        streams: answers come token by token.
        encodes: it answers with hidden states.
    """

    name: str
    inputs: frozenset[str]
    max_rows: int
    context_len: int
    encoder_decoder: bool = False
    streams: bool = False
    encodes: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True)
class GenerationJob:
    """One prompt and its candidates.

    Attributes:
        tensors: further inputs by their names in the contract, one value for each candidate,
            (n, 1), or word lists, (n, 2, W).
        scores: whether log probabilities are among the outputs that are wanted.
        ranks: whether that of each whole answer is.
    """

    prompt: Sequence[int]
    output_len: int
    candidates: int
    tensors: Mapping[str, Array] = field(default_factory=dict)
    scores: bool = False
    ranks: bool = False


@dataclass(frozen=True)
class Candidate:
    """One candidate, as far as it has grown.

    Attributes:
        ids: generated tokens, an end token included, (A,).
        own, top_ids, top: scores by place of prompt and answer, (L,), (L, W) and (L, W).
        cum_log_prob: of the whole answer, where it was asked for.
    """

    ids: Array
    own: Array | None = None
    top_ids: Array | None = None
    top: Array | None = None
    cum_log_prob: float = 0.0

    def place(self, index: int, *, best: int) -> Place:
        """Return the log probability of the token in a place, and the best tokens there."""
        if self.own is None or self.top_ids is None or self.top is None:
            return None, ()
        tops = (each[index, :best].tolist() for each in (self.top_ids, self.top))
        return float(self.own[index]), tuple(zip(*tops, strict=True))
