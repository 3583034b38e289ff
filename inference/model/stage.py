"""Base classes of a rank's part of a model."""

# Shapes: N tokens of a step, n tokens whose logits are wanted, E hidden

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import Architecture
from inference.model.step import AttentionRules, Step, Tokens
from inference.model.weights import RankWeights
from inference.parallel.linear import VocabParallelHead


class StageModel(ABC):
    """One rank's part of a model: the layers of its stage."""

    architecture: Architecture
    _embedding: Callable[[Tokens], Tensor] | None = None  # of the first stage

    def __init__(self, weights: RankWeights, architecture: Architecture) -> None:
        """Load the layers of this rank's stage.

        Raises:
            ValueError: Sizes cannot be divided among the ranks, or the architecture is unsupported.
            CheckpointMismatchError: Tensors hold values that are not finite.
        """
        self.dtype, self.device = weights.dtype, weights.device
        self.architecture = architecture
        self._load(weights)
        weights.check()

    @abstractmethod
    def _load(self, weights: RankWeights) -> None:
        """Load the layers."""

    def embed(self, tokens: Tokens) -> Tensor:
        """Return the input (N, E) of the first layer, of the encoder or the decoder."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(tokens)

    def empty_hidden(self, tokens: int) -> Tensor:
        """Return an uninitialised buffer (tokens, E) for hidden states."""
        hidden = self.architecture.hidden
        return torch.empty(tokens, hidden, dtype=self.dtype, device=self.device)


class GeneratorModel(StageModel):
    """One rank's part of a generating model."""

    rules: AttentionRules
    can_select_rows = False  # whether the last layer supports `Step.outputs_only`
    head: VocabParallelHead | None  # of the last stage

    @abstractmethod
    def run_layers(self, x: Tensor, step: Step) -> Tensor:
        """Return the output of this stage's last layer (N, E) for the input of its first."""

    def logits(self, x: Tensor, step: Step, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's slice of the logits of the wanted tokens, (n, slice) fp32."""
        assert self.head is not None, "only the last stage has a head"
        if len(step.output_rows) < len(x):
            x = x.index_select(0, step.output_rows)
        return self.head(x, out)
