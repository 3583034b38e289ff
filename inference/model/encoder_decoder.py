"""T5 models: an encoder over whole rows, and a decoder with attention over its output.

The architecture record describes the differences among T5, T5-v1.1, flan, mT5, UL2 and Megatron T5.
A pipeline stage holds its share of the layers of both stacks. `scalers` are IA3's, see
`layers.scaled`.
"""

# Shapes: N tokens, E hidden, H local heads, D head size, V vocabulary

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.encoder import Encoder
from inference.model.kv_cache import KVCache
from inference.model.layers import (
    MLP,
    Attention,
    Embedding,
    Sublayer,
    Sublayers,
    scaled,
)
from inference.model.ragged import EncoderStep
from inference.model.stage import GeneratorModel
from inference.model.step import AttentionRules, Segment, Step
from inference.model.weights import LayerLoader, RankWeights
from inference.parallel.gemm import Gemm, Product
from inference.parallel.linear import VocabParallelHead


@dataclass(frozen=True)
class CrossAttention:
    """Attention of the decoder over the encoder's output, whose keys and values are cached."""

    query: Product
    key_value: Product  # all keys, then all values
    out: Gemm
    heads: int
    layer: int  # index in the cache
    scalers: Tensor | None  # (tasks + 1, 2H, D)

    def cache_encoded(
        self,
        encoded: Tensor,
        cache_rows: Tensor,
        cache: KVCache,
        *,
        tasks: Tensor | None,
    ) -> None:
        """Store keys and values of the encoder's output (N, E) at `cache_rows`."""
        both = self.key_value(encoded).view(len(encoded), 2 * self.heads, -1)
        cache.write(self.layer, cache_rows, scaled(both, self.scalers, tasks))

    def __call__(self, x: Tensor, step: Step, residual: Tensor | None = None) -> Tensor:
        """Return (N, E) for normalised x (N, E)."""
        assert step.encoded is not None
        query = self.query(x).view(len(x), self.heads, -1)  # (N, H, D)
        return self.out(step.encoded(query, layer=self.layer), residual)


class T5Loader(LayerLoader):
    """Builds a T5 model's layers from a rank's tensors."""

    architecture: EncoderDecoderArchitecture

    @property
    def _score_scale(self) -> float:
        scales = self.architecture.scale_attention
        return 1 / math.sqrt(self.architecture.size_per_head) if scales else 1.0

    @property
    def _heads(self) -> int:
        return self.architecture.head_num // self.weights.layout.tp_size

    def embedding(self) -> Embedding:
        """Return the embedding of both stacks."""
        positions = "shared.ape" if self.architecture.position == "absolute" else None
        return self.input_side("shared.weight_T", positions, self.architecture.vocab_size)

    def head(self) -> VocabParallelHead:
        """Return the head, which may be tied to the embedding."""
        arch = self.architecture
        table = "lm_head.weight" if arch.untied_head else "shared.weight_T"
        bias = "shared.bias" if arch.bias else None
        return self.vocab_head(
            *(table, bias, arch.vocab_size),
            norm=self.norm("decoder.final_layer_norm"),
            input_scale=arch.hidden**-0.5 if arch.scale_logits else 1.0,
        )

    def relative_bias(self, side: str) -> Tensor | None:
        """Return the distance bias of this rank's heads, None with absolute positions."""
        if self.architecture.position != "relative":
            return None
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return distance_bias(
            self.weights.tensor(name),  # (H, buckets)
            max_distance=self.architecture.max_distance,
            bidirectional=side == "encoder",
        )

    def rules(self, side: str) -> AttentionRules:
        """Return the self-attention rules of the encoder or the decoder."""
        return AttentionRules(distance_bias=self.relative_bias(side), scale=self._score_scale)

    def encoder_layer(self, number: int) -> Sublayers:
        """Return the encoder layer of global number `number`."""
        block = f"encoder.block.{number}."
        layer = self.local(number, self.architecture.num_layer)
        return Sublayers(
            (self._attention(block, ["q", "k", "v"], layer), self._mlp(block, "layer.1."))
        )

    def decoder_layer(self, number: int) -> tuple[Sublayers, CrossAttention]:
        """Return the decoder layer of global number `number`, and its cross-attention."""
        block = f"decoder.block.{number}."
        across = block + "layer.1.EncDecAttention"
        layer = self.local(number, self.architecture.decoder_num_layer)
        cross = CrossAttention(
            query=self.column(f"{across}.q"),
            key_value=self.column(f"{across}.k", f"{across}.v"),
            out=self.row(f"{across}.o"),
            heads=self._heads,
            layer=layer,
            scalers=self._scalers(across, queries=False),
        )
        parts = (
            self._attention(block, ["qkv"], layer),
            self._sublayer(cross, block, "layer.1."),
            self._mlp(block, "layer.2."),
        )
        return Sublayers(parts), cross

    def _attention(self, block: str, names: Iterable[str], layer: int) -> Sublayer:
        name = block + "layer.0.SelfAttention"
        attention = Attention(
            self.column(*(f"{name}.{each}" for each in names)),
            self.row(f"{name}.o"),
            heads=(self._heads, self._heads, self.architecture.size_per_head),
            layer=layer,
            scalers=self._scalers(name),
        )
        return self._sublayer(attention, block, "layer.0.", "after_attention_adapter.")

    def _sublayer(self, part: Any, block: str, place: str, adapter: str | None = None) -> Sublayer:
        return Sublayer(
            part,
            self.norm(f"{block}{place}layer_norm"),
            adapter=self._adapter(block + adapter) if adapter else None,
            bounded=True,
        )

    def _mlp(self, block: str, place: str) -> Sublayer:
        name = f"{block}{place}DenseReluDense"
        up = self.up(f"{name}.wi", f"{name}.wi2" if self.architecture.gated else None)
        mlp = MLP(up, self.row(f"{name}.wo"), scalers=self._table(name))
        return self._sublayer(mlp, block, place, "after_ffn_adapter.")

    def _adapter(self, prefix: str) -> Sublayer | None:
        if not self.architecture.adapter_inter_size:
            return None
        # Adapters have a LayerNorm and SiLU in every model.
        up = self.column(prefix + "DenseSiluDense.wi", activation="silu")
        mlp = MLP(up, self.row(prefix + "DenseSiluDense.wo"))
        return Sublayer(mlp, self.norm(prefix + "layer_norm", kind="layernorm"))

    def _scalers(self, attention: str, *, queries: bool = True) -> Tensor | None:
        """Return the IA3 factors of (queries: ones,) keys and values, (tasks + 1, 3H or 2H, D)."""
        key, value = self._table(f"{attention}.k"), self._table(f"{attention}.v")
        if key is None or value is None:
            return None
        ones = [torch.ones_like(key)] if queries else []
        return torch.cat([*ones, key, value], dim=1).view(
            len(key), -1, self.architecture.size_per_head
        )

    def _table(self, name: str) -> Tensor | None:
        """Return an IA3 table, with a last row of ones for no task, (tasks + 1, width)."""
        if not self.architecture.ia3_num_tasks:
            return None
        table = self.weights.tensor(f"{name}.ia3.weight")
        return torch.cat((table, torch.ones_like(table[:1])))


def distance_bias(table: Tensor, *, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bias by distance, from a table (H, buckets) of learned values.

    Each short distance has a bucket, longer ones share buckets of logarithmic width, and all beyond
    `max_distance` share the last (Raffel et al., Exploring the Limits of Transfer Learning, section
    2.1). For a causal stack the result is (H, max_distance + 1), entry d for a key d tokens back;
    for a bidirectional one (H, 2 * max_distance + 1), entry d for offset d - max_distance.
    """
    buckets = table.shape[1] // 2 if bidirectional else table.shape[1]  # of one direction
    exact = buckets // 2
    back = torch.arange(max_distance + 1, device=table.device)
    # In fp32, as in the original, for the same bucket boundaries.
    ratio = torch.log(back.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).long()
    near = torch.where(back < exact, back, far.clamp_max(buckets - 1))  # (max_distance + 1,)
    return table[:, torch.cat((near.flip(0), near[1:] + buckets)) if bidirectional else near]


@dataclass(frozen=True)
class EncodedRow:
    """The encoder's output for a sequence: `length` tokens in a slot of the cache."""

    slot: int
    length: int
    task: int  # of IA3


def cross_segments(segments: Sequence[Segment], encoded: Sequence[EncodedRow]) -> list[Segment]:
    """Return segments for cross-attention, given the encoder's output for each segment.

    Tokens take the last positions of the encoder's output, which they see whole. Adjacent segments
    with the same encoder output become one.
    """
    found: list[Segment] = []
    for segment, row in zip(segments, encoded, strict=True):
        count = segment.tokens
        if found and found[-1].slot == row.slot:
            count += found.pop().tokens
        found.append(Segment(row.slot, row.length - count, count))
    return found


class EncoderDecoder(Encoder, GeneratorModel):
    """One rank's part of a T5 model, which may have no decoder."""

    architecture: EncoderDecoderArchitecture

    def _load(self, weights: RankWeights) -> None:
        layout, architecture = weights.layout, self.architecture
        self.encoder_layers = layout.layers(architecture.num_layer)
        loader = T5Loader(weights, architecture)
        self._embedding = loader.embedding() if layout.is_first_stage else None
        self.encoder = [loader.encoder_layer(number) for number in self.encoder_layers]
        self.encoder_rules = loader.rules("encoder")
        final_norm = "encoder.final_layer_norm"
        if layout.is_last_stage:
            self._encoder_norm = loader.norm(final_norm)
        self.decoder: list[Sublayers] = []
        self.cross: list[CrossAttention] = []  # by decoder layer
        self.head = None
        self.rules = AttentionRules()
        if architecture.decoder_num_layer:
            numbers = layout.layers(architecture.decoder_num_layer)
            for layer, cross in map(loader.decoder_layer, numbers):
                self.decoder.append(layer)
                self.cross.append(cross)
            self.rules = loader.rules("decoder")
            if layout.is_last_stage:
                self.head = loader.head()

    def cache_encoded(
        self, encoded: Tensor, step: EncoderStep, slots: Sequence[int], cache: KVCache
    ) -> None:
        """Store the keys and values of the encoder's output (N, E) for this stage's decoder layers.

        `slots` are the cache slots of the rows.
        """
        cache_rows = cache.token_rows(step.rows.per_token(slots), step.rows.positions)
        for cross in self.cross:
            cross.cache_encoded(encoded, cache_rows, cache, tasks=step.tasks)

    def run_layers(self, x: Tensor, step: Step) -> Tensor:
        """Return the output of this stage's last decoder layer (N, E)."""
        for layer in self.decoder:
            x = layer(x, step)
        return x
