"""Activations of a model from its first layer to its logits, by place."""

# Shapes: N tokens, W width of a place (hidden, or the vocabulary)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_TOKENS, _ANSWER_TOKENS = 16, 6  # that are computed unless some are given
LOGITS = "logits"
OUTPUT = "output"  # of a model without logits
EMBEDDING = "embedding"  # the first layer's input
# "embedding", "layer 3", "decoder layer 3", "output" or "logits" -> (N, W) fp32, as computed.
Activations = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Token ids of the compared pass; `decoder_ids` only for an encoder-decoder."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()


def spread_ids(count: int, vocab_size: int, first: int = 5) -> tuple[int, ...]:
    """Return `count` token ids from all over a vocabulary, the same ones every time."""
    return tuple((first + 7919 * place) % vocab_size for place in range(count))


@dataclass(frozen=True)
class Source:
    """A checkpoint in its library, one row at a time.

    Attributes:
        title: library, version and class, for people.
        positions: most tokens of a row; None without a limit.
        start: the first token of an encoder-decoder's answer; None for another model.
    """

    title: str
    vocab_size: int
    positions: int | None
    compute: Callable[[ModelInputs], Activations]
    start: int | None = None

    def default_inputs(self) -> ModelInputs:
        """Return ids from all over the vocabulary; behind an encoder, with an answer."""
        ids = spread_ids(min(_TOKENS, self.positions or _TOKENS), self.vocab_size)
        if self.start is None:
            return ModelInputs(ids)
        return ModelInputs(ids, (self.start, *spread_ids(_ANSWER_TOKENS, self.vocab_size)))

    def run(self, inputs: ModelInputs) -> Activations:
        """Return the first layer's input, the output of every layer, and the logits or the output.

        Raises:
            ValueError: token ids lie outside the vocabulary, or the library does not take such a
                model.
        """
        every = (*inputs.ids, *inputs.decoder_ids)
        if strange := [each for each in every if not 0 <= each < self.vocab_size]:
            raise ValueError(f"token ids {strange} are not below vocab_size={self.vocab_size}")
        with torch.no_grad():
            return self.compute(inputs)


def watch_layers(layers: Sequence[Any], noted: Activations, stack: str = "") -> list[Any]:
    """Begin to note the first layer's input and every layer's output; return the hooks."""

    def note(place: str, states: torch.Tensor) -> None:
        noted[stack + place] = states.reshape(-1, states.shape[-1]).to(torch.float32, copy=True)

    def embedded(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        note(EMBEDDING, args[0] if args else named["hidden_states"])

    def watch(number: int, layer: Any) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            note(f"layer {number}", output[0] if isinstance(output, tuple) else output)

        return layer.register_forward_hook(hook)

    first = layers[0].register_forward_pre_hook(embedded, with_kwargs=True)
    return [first, *(watch(number, layer) for number, layer in enumerate(layers))]


def relative_error(expected: torch.Tensor, found: torch.Tensor, *, largest: float) -> float:
    """Return the largest error of values as a share of `largest`.

    Values that are the same on both sides have none, also those that are not finite.
    """
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    error = float((found - expected).abs().masked_fill(is_same, 0.0).max())
    return error / largest if largest else error
