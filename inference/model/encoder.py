"""BERT-like encoders: post-layernorm layers from hidden states to hidden states.

Embeddings, pooler and heads run outside, as FasterTransformer has it.
"""

# Shapes: N tokens of all rows, E hidden

import math

from torch import Tensor

from export_scripts.families.layout.architecture import EncoderArchitecture
from inference.model.layers import MLP, Attention, Sublayer, Sublayers
from inference.model.ragged import EncoderStep, RaggedRows
from inference.model.stage import StageModel
from inference.model.step import AttentionRules
from inference.model.weights import LayerLoader, RankWeights
from inference.parallel.epilogue import GemmOptions
from inference.parallel.linear import AllReduce


class Encoder(StageModel):
    """One rank's part of a BERT-like encoder."""

    architecture: EncoderArchitecture

    def _load(self, weights: RankWeights, reduce: AllReduce | None, gemm: GemmOptions) -> None:
        loader = LayerLoader(weights, self.architecture, reduce, gemm)
        numbers = weights.layout.layers(self.architecture.num_layer)
        self.layers = [_layer(loader, number) for number in numbers]

    def run_layers(self, x: Tensor, step: RaggedRows) -> Tensor:
        """Return the output of this stage's last layer (N, E) for its first layer's input."""
        scale = 1 / (math.sqrt(self.architecture.size_per_head) * self.architecture.q_scaling)
        inputs = EncoderStep(step, AttentionRules(scale=scale))
        for layer in self.layers:
            x = layer(x, inputs)
        return x


def _layer(parts: LayerLoader[EncoderArchitecture], number: int) -> Sublayers:
    prefix, architecture = f"model.encoder.layer.{number}.", parts.architecture
    projections = [prefix + f"attention.self.{name}" for name in ("query", "key", "value")]
    heads = architecture.head_num // parts.weights.layout.tp_size
    attention = Attention(
        parts.column(*projections),
        parts.row(prefix + "attention.output.dense"),
        heads=(heads, heads, architecture.size_per_head),
        layer=parts.local(number, architecture.num_layer),
    )
    mlp = MLP(parts.up(prefix + "intermediate.dense"), parts.row(prefix + "output.dense"))
    return Sublayers(
        (
            Sublayer(attention, None, sum_norm=parts.norm(prefix + "attention.output.LayerNorm")),
            Sublayer(mlp, None, sum_norm=parts.norm(prefix + "output.LayerNorm")),
        )
    )
