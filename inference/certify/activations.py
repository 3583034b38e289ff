"""Activations of a model from its first layer's input to its logits, by place."""

# Shapes: N tokens, W width of a place (hidden size or vocabulary)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_TOKENS, _ANSWER_TOKENS = 16, 6  # length of the default inputs
LOGITS = "logits"
OUTPUT = "output"  # hidden states of a model without logits
EMBEDDING = "embedding"  # the first layer's input
# "embedding", "layer 3", "decoder layer 3", "output" or "logits" -> (N, W) fp32, as computed.
Activations = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Token ids of one forward pass; `decoder_ids` only for an encoder-decoder."""

    ids: tuple[int, ...]
    decoder_ids: tuple[int, ...] = ()


def spread_ids(count: int, vocab_size: int) -> tuple[int, ...]:
    """Return `count` token ids spread over a vocabulary, the same in every run."""
    return tuple((5 + 7919 * place) % vocab_size for place in range(count))


@dataclass(frozen=True)
class Source:
    """A checkpoint loaded by a library, which computes one row at a time.

    Attributes:
        title: library, version and class, for messages.
        positions: maximum number of tokens of a row; None without a limit.
        start: first token of an encoder-decoder's answer; None for other models.
    """

    title: str
    vocab_size: int
    positions: int | None
    compute: Callable[[ModelInputs], Activations]
    start: int | None = None

    def default_inputs(self) -> ModelInputs:
        """Return ids spread over the vocabulary, with an answer for an encoder-decoder."""
        ids = spread_ids(min(_TOKENS, self.positions or _TOKENS), self.vocab_size)
        if self.start is None:
            return ModelInputs(ids)
        return ModelInputs(ids, (self.start, *spread_ids(_ANSWER_TOKENS, self.vocab_size)))

    def run(self, inputs: ModelInputs) -> Activations:
        """Return the first layer's input, the output of every layer, and the logits or the output.

        Raises:
            ValueError: token ids lie outside the vocabulary, or the library cannot compute such a
                model.
        """
        ids = (*inputs.ids, *inputs.decoder_ids)
        if invalid := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token ids {invalid} are not below vocab_size={self.vocab_size}")
        with torch.no_grad():
            return self.compute(inputs)


def record_layers(layers: Sequence[Any], activations: Activations, stack: str = "") -> list[Any]:
    """Register hooks that record the first layer's input and every layer's output; return them."""

    def record(place: str, states: torch.Tensor) -> None:
        rows = states.reshape(-1, states.shape[-1])
        activations[stack + place] = rows.to(torch.float32, copy=True)

    def record_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    def record_output(number: int, layer: Any) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            record(f"layer {number}", output[0] if isinstance(output, tuple) else output)

        return layer.register_forward_hook(hook)

    first = layers[0].register_forward_pre_hook(record_input, with_kwargs=True)
    return [first, *(record_output(number, layer) for number, layer in enumerate(layers))]


def relative_error(expected: torch.Tensor, found: torch.Tensor, *, largest: float) -> float:
    """Return the largest error as a share of `largest`; equal non-finite values have none."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    error = float((found - expected).abs().masked_fill(is_same, 0.0).max())
    return error / largest if largest else error
