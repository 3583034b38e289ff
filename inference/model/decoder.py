"""Decoder-only models: GPT, OPT, BLOOM, GPT-J, GPT-NeoX, and today's dense ones.

The architecture record states the differences; a pipeline stage holds only its layers, and only the
linears know how tensors are divided among ranks.
"""

# Shapes: N tokens of a step, E hidden

from __future__ import annotations

from dataclasses import replace

import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.decoder_layers import DecoderLoader
from inference.model.stage import GeneratorModel
from inference.model.step import Step
from inference.model.weights import RankWeights
from inference.parallel.epilogue import GemmOptions
from inference.parallel.linear import AllReduce


class Decoder(GeneratorModel):
    """One rank's part of a decoder-only model."""

    architecture: DecoderArchitecture

    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        layout, architecture = weights.layout, self.architecture
        loader = DecoderLoader(weights, architecture, reduce, gemm)
        self._embedding = loader.embedding() if layout.is_first_stage else None
        self.layers = [loader.layer(number) for number in layout.layers(architecture.num_layer)]
        self.head = loader.head() if layout.is_last_stage else None
        self._rotary = loader.tables()
        self.rules = loader.rules()

    def embed(self, step: Step) -> torch.Tensor:
        """Return the first layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(
            step.ids, step.positions, has_virtual=step.has_virtual, embeddings=step.embeddings
        )

    def run_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of this stage's last layer (N, E)."""
        step = replace(step, angles={table: table(step.positions) for table in self._rotary})
        for layer in self.layers:
            x = layer(x, step)
        return x
