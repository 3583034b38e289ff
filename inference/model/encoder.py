"""BERT-like encoders: post-layernorm layers from hidden states to hidden states.

Embeddings, pooler and heads run outside, as FasterTransformer has it.
"""

# Shapes: N tokens of all rows, E hidden

import math
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import EncoderArchitecture
from inference.model.layers import MLP, Normalise, RowAttention
from inference.model.ragged import RaggedRows, RowMasks
from inference.model.stage import StageModel
from inference.model.weights import LayerLoader, RankWeights
from inference.parallel.epilogue import GemmOptions
from inference.parallel.linear import AllReduce


@dataclass(frozen=True)
class EncoderLayer:
    """Attention and MLP, each followed by a norm of its sum with the residual."""

    attention: RowAttention
    attention_norm: Normalise
    mlp: MLP
    mlp_norm: Normalise

    def __call__(self, x: torch.Tensor, masks: RowMasks) -> torch.Tensor:
        """Return (N, E) for x (N, E)."""
        x = self.attention_norm(self.attention(x, masks), x)
        y: torch.Tensor = self.mlp_norm(self.mlp(x, masks), x)
        return y


class Encoder(StageModel):
    """One rank's part of a BERT-like encoder."""

    architecture: EncoderArchitecture

    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        loader = LayerLoader(weights, self.architecture, reduce, gemm)
        numbers = weights.layout.layers(self.architecture.num_layer)
        self.layers = [_layer(loader, number) for number in numbers]

    def run_layers(self, x: torch.Tensor, step: RaggedRows) -> torch.Tensor:
        """Return the output of this stage's last layer (N, E) for its first layer's input."""
        masks = RowMasks(step, None, self.dtype)
        for layer in self.layers:
            x = layer(x, masks)
        return x


def _layer(parts: LayerLoader[EncoderArchitecture], number: int) -> EncoderLayer:
    prefix, architecture = f"model.encoder.layer.{number}.", parts.architecture
    projections = [prefix + f"attention.self.{name}" for name in ("query", "key", "value")]
    return EncoderLayer(
        attention=RowAttention(
            qkv=parts.column(*projections),
            out=parts.row(prefix + "attention.output.dense"),
            heads=architecture.head_num // parts.weights.layout.tp_size,
            scale=1 / (math.sqrt(architecture.size_per_head) * architecture.q_scaling),
        ),
        attention_norm=parts.norm(prefix + "attention.output.LayerNorm"),
        mlp=MLP(parts.up(prefix + "intermediate.dense"), parts.row(prefix + "output.dense")),
        mlp_norm=parts.norm(prefix + "output.LayerNorm"),
    )
