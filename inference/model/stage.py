"""One rank's part of a model of any kind."""

# Shapes: N tokens of a step, n tokens whose logits are wanted, E hidden

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import Architecture
from inference.model.layers import Embedding
from inference.model.step import AttentionRules, Step, Tokens
from inference.model.weights import RankWeights
from inference.parallel.epilogue import PLAIN_GEMM, GemmOptions
from inference.parallel.linear import AllReduce, VocabParallelHead


class StageModel(ABC):
    """One rank's part of a model: the layers of its stage."""

    architecture: Architecture

    def __init__(
        self,
        weights: RankWeights,
        architecture: Architecture,
        *,
        reduce: AllReduce | None,
        gemm: GemmOptions = PLAIN_GEMM,
    ) -> None:
        """Load the layers of this rank's stage; `reduce` and `gemm` as for `LayerLoader`.

        Raises:
            ValueError: The sizes do not divide among the ranks, or a choice is not supported.
            CheckpointMismatchError: Tensors hold values that are not finite.
        """
        self.dtype, self.device = weights.dtype, weights.device
        self.architecture = architecture
        self._load(weights, reduce, gemm)
        weights.check()

    @abstractmethod
    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        """Load the layers."""

    def empty_hidden(self, tokens: int) -> Tensor:
        """Return an uninitialised (tokens, E) for the hidden states of the stage before."""
        hidden = self.architecture.hidden
        return torch.empty(tokens, hidden, dtype=self.dtype, device=self.device)

    @abstractmethod
    def run_layers(self, x: Tensor, step: Any) -> Tensor:
        """Return the output of this stage's last layer (N, E) for the input of its first."""


class GeneratorModel(StageModel):
    """One rank's part of a model that generates; only the first stage embeds."""

    rules: AttentionRules
    narrows = False  # whether its last layer can compute some rows alone, see `Step`
    _embedding: Embedding | None  # of the first stage
    head: VocabParallelHead | None  # of the last stage

    def embed(self, tokens: Tokens) -> Tensor:
        """Return the input of the first layer, of either stack (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(tokens)

    def logits(self, x: Tensor, step: Step, *, out: Tensor | None = None) -> Tensor:
        """Return this rank's slice of the logits of the wanted tokens, (n, slice) fp32."""
        assert self.head is not None, "only the last stage has a head"
        if len(step.output_rows) < len(x):
            x = x.index_select(0, step.output_rows)
        return self.head(x, out)
