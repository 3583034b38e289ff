"""Decoder-only models: GPT, OPT, BLOOM, GPT-J, GPT-NeoX, and today's dense ones.

The architecture record states the differences; a pipeline stage holds only its layers, and only the
linears know how tensors are divided among ranks.
"""

# Shapes: N tokens of a step, E hidden

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.layers import MLP, Attention, Embedding, JointHalves, Sublayer, normalised
from inference.model.rotary import AnglesOf, RotaryTable
from inference.model.stage import GeneratorModel, Head
from inference.model.step import AttentionRules, Step
from inference.model.weights import RankWeights
from inference.parallel.linear import AllReduce


@dataclass(frozen=True)
class DecoderLayer:
    """One layer; `architecture.residual` says how its two halves are joined."""

    architecture: DecoderArchitecture
    attention: Sublayer[Attention]
    mlp: Sublayer[MLP]  # of parallel halves without a norm of its own, attention's feeds both
    reduce: AllReduce | None  # of the parallel forms, which share one all-reduce
    bias: torch.Tensor | None  # added after it

    def __call__(
        self, x: torch.Tensor, step: Step, *, layer: int, angles: AnglesOf
    ) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""
        choice, attention, mlp = self.architecture, self.attention, self.mlp

        def attend(h: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            return attention.part(h, step, layer=layer, angles=angles, residual=residual)

        if choice.residual != "sequential":
            h = normalised(x, attention.norm)
            inner = h if mlp.norm is None else mlp.norm(x)
            if self.reduce is None:
                return mlp.part(inner, attend(h, x))
            return self.reduce(mlp.part(inner, attend(h, None)), bias=self.bias, residual=x)
        if not choice.norm_before:
            x = normalised(attend(x, x), attention.norm)
            return normalised(mlp.part(x, x), mlp.norm)
        if choice.residual_from_norm:
            h = normalised(x, attention.norm)
            h = normalised(attend(h, h), mlp.norm)
            return mlp.part(h, h)
        return mlp(attention(x, step, layer=layer, angles=angles))


class Decoder(GeneratorModel):
    """One rank's part of a decoder-only model; `decoder_weights.load_decoder` makes it."""

    architecture: DecoderArchitecture

    def __init__(
        self,
        weights: RankWeights,
        architecture: DecoderArchitecture,
        *,
        embedding: Embedding | None,
        layers: Sequence[DecoderLayer | Sublayer[JointHalves]],
        head: Head | None,
        rotary: Collection[RotaryTable],
        rules: AttentionRules,
    ) -> None:
        """Take the layers of a stage; the embedding is the first stage's, the head the last's."""
        super().__init__(weights)
        self.architecture = architecture
        self.rules = rules
        self._embedding = embedding
        self.layers = list(layers)
        self.head = head
        self._rotary = rotary

    def embed(self, step: Step) -> torch.Tensor:
        """Return the first layer's input (N, E)."""
        assert self._embedding is not None, "only the first stage embeds"
        return self._embedding(
            step.ids, step.positions, has_virtual=step.has_virtual, embeddings=step.embeddings
        )

    def run_layers(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the output of this stage's last layer (N, E)."""
        angles = {table: table(step.positions) for table in self._rotary}
        for layer, run in enumerate(self.layers):
            x = run(x, step, layer=layer, angles=angles)
        return x
