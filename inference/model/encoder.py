"""The base class of encoders, and BERT: post-layernorm layers over hidden states.

As in FasterTransformer, clients compute BERT's embeddings, pooler and heads.
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
    encoder_layers: range  # global layer numbers
    encoder_rules: AttentionRules
    _encoder_norm: Normalise | None = None  # final norm, on the last stage

    def run_encoder(self, x: Tensor, step: EncoderStep, layers: range) -> Tensor:
        """Run some of this stage's encoder layers, by global number, on x (N, E)."""
        for number in layers:
            x = self.encoder[number - self.encoder_layers.start](x, step)
        return x

    def encode(self, ids: Tensor, rows: RaggedRows) -> Tensor:
        """Return the encoder's output (N, E) for ids without extras, without a pipeline."""
        step = EncoderStep(rows, self.encoder_rules)
        x = self.embed(Tokens(ids=ids, positions=rows.positions))
        return self.finish_encoder(self.run_encoder(x, step, self.encoder_layers))

    def finish_encoder(self, x: Tensor) -> Tensor:
        """Apply the final norm, if any, to the last layer's output (N, E)."""
        return normalised(x, self._encoder_norm)


class Bert(Encoder):
    """One rank's part of a BERT-like encoder, whose inputs are hidden states (N, E)."""

    architecture: EncoderArchitecture

    def _load(self, weights: RankWeights) -> None:
        arch = self.architecture
        loader = LayerLoader(weights, arch)
        dtype = weights.dtype
        self._embedding = lambda tokens: tokens.ids.to(dtype)
        self.encoder_layers = weights.layout.layers(arch.num_layer)
        self.encoder = [_layer(loader, number) for number in self.encoder_layers]
        scale = 1 / (math.sqrt(arch.size_per_head) * arch.q_scaling)
        self.encoder_rules = AttentionRules(scale=scale)


def _layer(parts: LayerLoader, number: int) -> Sublayers:
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
