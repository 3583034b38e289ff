"""Activations of a model from its input to its logits, by place and part."""

# Shapes: N tokens, W width of a part (hidden, or the vocabulary)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


class NoLibraryError(ValueError):
    """A source's layers cannot be computed here; its weights can still be compared."""


# Tokens that are computed unless some are given.
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Place:
    """One thing that both models compute.

    Attributes:
        where: "embedding", "layer 3", "decoder layer 3", "final norm", "logits".
        part: "output", or within a layer "attention", "cross attention" or "mlp": each what is
            added to the residual.
    """

    where: str
    part: str = "output"

    def __str__(self) -> str:
        return self.where if self.part == "output" else f"{self.where}, {self.part}"


# In the order of computation, each (N, W) fp32.
Activations = Mapping[Place, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Token ids of the compared pass; `decoder_ids` only for an encoder-decoder."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()


def check_inputs(inputs: ModelInputs, *, vocab_size: int, positions: int | None) -> None:
    """Raise ValueError, with all that is wrong, for token ids that a model does not take."""
    problems = [
        f"token id {token} is not below vocab_size={vocab_size}"
        for token in (*inputs.ids, *inputs.decoder_ids)
        if not 0 <= token < vocab_size
    ]
    if positions is not None and len(inputs.ids) > positions:
        problems.append(
            f"{len(inputs.ids)} token ids exceed max_position_embeddings={positions}; give fewer"
        )
    if problems:
        raise ValueError("\n".join(problems))


def spread_ids(vocab_size: int, count: int) -> tuple[int, ...]:
    """Return `count` token ids from all over a vocabulary, the same ones every time."""
    return tuple((5 + 7919 * place) % vocab_size for place in range(count))


@dataclass(frozen=True)
class ActivationDifference:
    """The difference of one part from the source's.

    Attributes:
        relative: the largest error, of the source's largest value.
    """

    place: Place
    max_abs: float
    mean_abs: float
    relative: float
    tolerance: float

    @property
    def deviates(self) -> bool:
        """Return whether rounding does not explain the difference; NaN never is rounding."""
        return not self.relative <= self.tolerance


def compare_activations(
    source: Activations, shards: Activations, *, tolerance: float
) -> tuple[ActivationDifference, ...]:
    """Return the difference at every place, in the order of computation.

    Raises:
        ValueError: the two models do not compute the same things.
    """
    if problems := _shape_problems(source, shards):
        raise ValueError("\n".join(problems))
    found = []
    for place, expected in source.items():
        errors = size_of_errors(expected, shards[place], largest=float(expected.abs().max()))
        found.append(ActivationDifference(place, *errors, tolerance))
    return tuple(found)


def _shape_problems(source: Activations, shards: Activations) -> list[str]:
    problems = [
        f"{place} is computed by the {owner} only"
        for owner, ours, theirs in (("source", source, shards), ("folder's model", shards, source))
        for place in ours
        if place not in theirs
    ]
    return problems + [
        f"{place}: the source gives {list(expected.shape)}, the folder {list(shards[place].shape)}"
        for place, expected in source.items()
        if place in shards and shards[place].shape != expected.shape
    ]


def size_of_errors(
    expected: torch.Tensor, found: torch.Tensor, *, largest: float
) -> tuple[float, float, float]:
    """Return the largest and the mean error of values, and the first as a share of `largest`."""
    error = (found - expected).abs()
    max_abs = float(error.max())
    return max_abs, float(error.mean()), max_abs / largest if largest else max_abs
