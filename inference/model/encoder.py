"""Encoders over whole rows, and BERT-like ones: post-layernorm layers from states to states.

BERT's embeddings, pooler and heads run outside, as FasterTransformer has it.
"""

# Shapes: N tokens of all rows, E hidden

import math

from torch import Tensor

from export_scripts.families.layout.architecture import EncoderArchitecture
from inference.model.layers import MLP, Attention, Normalise, Sublayer, Sublayers, normalised
from inference.model.ragged import EncoderStep, RaggedRows
from inference.model.stage import StageModel
from inference.model.step import AttentionRules, Tokens
from inference.model.weights import LayerLoader, RankWeights


class Encoder(StageModel):
    """One rank's part of an encoder."""

    encoder: list[Sublayers]
    encoder_layers: range  # their global numbers
    encoder_rules: AttentionRules
    _encoder_norm: Normalise | None = None  # of the last stage

    def run_encoder(self, x: Tensor, step: EncoderStep, layers: range) -> Tensor:
        """Return the output (N, E) of some of this stage's encoder layers for their input (N, E).

        `layers` are global numbers.
        """
        for number in layers:
            x = self.encoder[number - self.encoder_layers.start](x, step)
        return x

    def encode(self, ids: Tensor, rows: RaggedRows) -> Tensor:
        """Return the encoder's output (N, E) for the ids of plain rows, of a single stage."""
        step = EncoderStep(rows, self.encoder_rules)
        x = self.embed(Tokens(ids=ids, positions=rows.positions))
        return self.finish_encoder(self.run_encoder(x, step, self.encoder_layers))

    def finish_encoder(self, x: Tensor) -> Tensor:
        """Return the encoder's output (N, E) for that of its last layer."""
        return normalised(x, self._encoder_norm)


class Bert(Encoder):
    """One rank's part of a BERT-like encoder, whose ids are hidden states (N, E)."""

    architecture: EncoderArchitecture

    def _load(self, weights: RankWeights) -> None:
        choice = self.architecture
        loader = LayerLoader(weights, choice)
        dtype = weights.dtype
        self._embedding = lambda tokens: tokens.ids.to(dtype)
        self.encoder_layers = weights.layout.layers(choice.num_layer)
        self.encoder = [_layer(loader, number) for number in self.encoder_layers]
        scale = 1 / (math.sqrt(choice.size_per_head) * choice.q_scaling)
        self.encoder_rules = AttentionRules(scale=scale)


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
