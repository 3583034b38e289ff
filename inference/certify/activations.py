"""Activations of a model from its input to its logits, by place and part."""

# Shapes: N tokens, W width of a part (hidden, or the vocabulary)

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class NoLibraryError(ValueError):
    """A source's layers cannot be computed here; its weights can still be compared."""


TOKENS = 16  # that are computed unless some are given


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


def spread_ids(count: int, vocab_size: int, first: int = 5) -> tuple[int, ...]:
    """Return `count` token ids from all over a vocabulary, the same ones every time."""
    return tuple((first + 7919 * place) % vocab_size for place in range(count))


@dataclass(frozen=True)
class Source(abc.ABC):
    """A checkpoint that its own library computes.

    Attributes:
        title: library, version and class, for people.
        positions: most tokens of a row; None without a limit.
    """

    title: str
    vocab_size: int
    positions: int | None

    @abc.abstractmethod
    def compute(self, inputs: ModelInputs, noted: dict[Place, torch.Tensor]) -> None:
        """Note what every layer computes, in order, each place (N, W) fp32."""

    def default_inputs(self, ids: tuple[int, ...] = ()) -> ModelInputs:
        """Return `ids`, or ids from all over the vocabulary."""
        return ModelInputs(ids or self.spread_ids(min(TOKENS, self.positions or TOKENS)))

    def spread_ids(self, count: int) -> tuple[int, ...]:
        """Return `count` token ids from all over the vocabulary, the same ones every time."""
        return spread_ids(count, self.vocab_size)

    def run(self, inputs: ModelInputs) -> Activations:
        """Return what every layer computes, each place (N, W) fp32.

        Raises:
            ValueError: token ids lie outside the vocabulary, or there are too many of them; or the
                library does not take such a model.
        """
        problems = [
            f"token id {token} is not below vocab_size={self.vocab_size}"
            for token in (*inputs.ids, *inputs.decoder_ids)
            if not 0 <= token < self.vocab_size
        ]
        if self.positions is not None and len(inputs.ids) > self.positions:
            problems.append(
                f"{len(inputs.ids)} token ids exceed max_position_embeddings={self.positions}; "
                "give fewer"
            )
        if problems:
            raise ValueError("\n".join(problems))
        noted: dict[Place, torch.Tensor] = {}
        self.compute(inputs, noted)
        return noted


def watch_layers(
    layers: Sequence[tuple[Any, Mapping[str, Any]]],
    final_norm: Any,
    noted: dict[Place, torch.Tensor],
    prefix: str = "",
) -> list[Any]:
    """Begin to note the first layer's input, every layer, its parts, and the final norm, if any.

    Each layer stands with the linear that ends each of its parts. Returns the handles of the hooks.
    """

    def note(states: torch.Tensor, place: Place) -> None:
        # (1, N, W) or (N, 1, W); some layers fold the row into the tokens before a linear.
        noted[place] = states.reshape(-1, states.shape[-1]).to(torch.float32, copy=True)

    def embedded(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        note(args[0] if args else named["hidden_states"], Place(f"{prefix}embedding"))

    def watch(module: Any, place: Place) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            states, more = output[:2] if isinstance(output, tuple) else (output, None)
            # A linear of megatron-core gives its bias apart; a layer gives what it attended to.
            note(states if more is None or place.part == "output" else states + more, place)

        return module.register_forward_hook(hook)

    handles = [layers[0][0].register_forward_pre_hook(embedded, with_kwargs=True)]
    for number, (layer, parts) in enumerate(layers):
        where = f"{prefix}layer {number}"
        handles += [watch(module, Place(where, part)) for part, module in parts.items()]
        handles.append(watch(layer, Place(where)))
    if final_norm is not None:
        handles.append(watch(final_norm, Place(f"{prefix}final norm")))
    return handles


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
    problems = [
        f"{place} is computed by the {owner} only"
        for owner, ours, theirs in (("source", source, shards), ("folder's model", shards, source))
        for place in ours
        if place not in theirs
    ]
    problems += [
        f"{place}: the source gives {list(expected.shape)}, the folder {list(shards[place].shape)}"
        for place, expected in source.items()
        if place in shards and shards[place].shape != expected.shape
    ]
    if problems:
        raise ValueError("\n".join(problems))
    found = []
    for place, expected in source.items():
        errors = size_of_errors(expected, shards[place], largest=float(expected.abs().max()))
        found.append(ActivationDifference(place, *errors, tolerance))
    return tuple(found)


def size_of_errors(
    expected: torch.Tensor, found: torch.Tensor, *, largest: float
) -> tuple[float, float, float]:
    """Return the largest and the mean error of values, and the first as a share of `largest`."""
    error = (found - expected).abs()
    max_abs = float(error.max())
    return max_abs, float(error.mean()), max_abs / largest if largest else max_abs
