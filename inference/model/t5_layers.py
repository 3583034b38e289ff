"""T5 layers and their loading; only they have attention over an encoder's output, and adapters.

`scalers` are those of IA3, see `layers.scaled`.
"""

# Shapes: N tokens, E hidden, H local heads, D head size, V vocabulary

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.cached_attention import attend_cached
from inference.model.kv_cache import KVCache
from inference.model.layers import (
    MLP,
    Attention,
    Embedding,
    Normalise,
    PartT,
    RowAttention,
    Sublayer,
    scaled,
)
from inference.model.ragged import RowMasks
from inference.model.relative_position import distance_bias
from inference.model.stage import Head
from inference.model.step import Step
from inference.model.weights import LayerLoader
from inference.parallel.gemm import Product
from inference.parallel.linear import RowParallelLinear


@dataclass(frozen=True)
class CrossAttention:
    """Attention of the decoder over the encoder's output, whose keys and values are cached."""

    query: Product
    key_value: Product  # all keys, then all values
    out: RowParallelLinear
    heads: int
    scalers: torch.Tensor | None  # (tasks + 1, 2H, D)

    def cache_encoded(
        self,
        encoded: torch.Tensor,
        cache_rows: torch.Tensor,
        cache: KVCache,
        *,
        layer: int,
        tasks: torch.Tensor | None,
    ) -> None:
        """Store keys and values of encoder output (N, E) at `cache_rows`."""
        both = self.key_value(encoded).view(len(encoded), 2 * self.heads, -1)
        cache.write(layer, cache_rows, scaled(both, self.scalers, tasks))

    def __call__(
        self, x: torch.Tensor, step: Step, *, layer: int, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (N, E) for normalised x (N, E)."""
        assert step.encoded is not None
        query = self.query(x).view(len(x), self.heads, -1)  # (N, H, D)
        if step.encoded.paged is not None:
            mixed = step.encoded.paged(query, step.cache, layer=layer)
        else:
            mixed = attend_cached(query, step.encoded.groups, step.cache, layer)
        return self.out(mixed, residual)


@dataclass(frozen=True)
class T5EncoderLayer:
    """One encoder layer."""

    attention: Sublayer[RowAttention]
    mlp: Sublayer[MLP]

    def __call__(
        self,
        x: torch.Tensor,
        masks: RowMasks,
        tasks: torch.Tensor | None,
        weights_out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (N, E) for x (N, E)."""
        x = self.attention(x, masks, tasks=tasks, weights_out=weights_out)
        return self.mlp(x, tasks=tasks)


@dataclass(frozen=True)
class T5DecoderLayer:
    """One decoder layer."""

    attention: Sublayer[Attention]
    cross: Sublayer[CrossAttention]
    mlp: Sublayer[MLP]

    def __call__(self, x: torch.Tensor, step: Step, layer: int) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""
        x = self.attention(x, step, layer=layer, tasks=step.tasks)
        x = self.cross(x, step, layer=layer)
        return self.mlp(x, tasks=step.tasks)


class T5Loader(LayerLoader[EncoderDecoderArchitecture]):
    """Builder of a T5 model's layers from a rank's tensors."""

    @property
    def score_scale(self) -> float:
        """The factor on the scores of attention."""
        scales = self.architecture.scale_attention
        return 1 / math.sqrt(self.architecture.size_per_head) if scales else 1.0

    @property
    def _heads(self) -> int:
        return self.architecture.head_num // self.weights.layout.tp_size

    def embedding(self) -> Embedding:
        """Return the input side of both stacks."""
        absolute = self.architecture.position == "absolute"
        return Embedding(
            tokens=self.tokens("shared.weight_T", self.architecture.vocab_size),
            vocab_size=self.architecture.vocab_size,
            positions=self.weights.tensor("shared.ape") if absolute else None,
            prompts=self.prompts(),
            dtype=self.weights.dtype,
        )

    def head(self) -> Head:
        """Return the output side; without a head of its own the embedding serves."""
        choice = self.architecture
        table = "lm_head.weight" if choice.untied_head else "shared.weight_T"
        bias = "shared.bias" if choice.bias else None
        return Head(
            self.final_norm("decoder"),
            self.vocab_head(table, bias, choice.vocab_size),
            scale=choice.hidden**-0.5 if choice.scale_logits else 1.0,
        )

    def relative_bias(self, side: str) -> torch.Tensor | None:
        """Return the bias by distance of this rank's heads, None with absolute positions."""
        if self.architecture.position != "relative":
            return None
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return distance_bias(
            self.weights.tensor(name),  # (H, buckets)
            max_distance=self.architecture.max_distance,
            bidirectional=side == "encoder",
        )

    def final_norm(self, side: str) -> Normalise:
        """Return the norm after a stack's last layer."""
        return self.norm(f"{side}.final_layer_norm")

    def encoder_layer(self, number: int) -> T5EncoderLayer:
        """Return the encoder layer of global number `number`."""
        block = f"encoder.block.{number}."
        name = block + "layer.0.SelfAttention"
        attention = RowAttention(
            qkv=self.column(f"{name}.q", f"{name}.k", f"{name}.v"),
            out=self.row(f"{name}.o"),
            heads=self._heads,
            scale=self.score_scale,
            scalers=self._scalers(name),
        )
        return T5EncoderLayer(
            self._sublayer(attention, block, "layer.0.", "after_attention_adapter."),
            self._mlp(block, "layer.1."),
        )

    def decoder_layer(self, number: int) -> T5DecoderLayer:
        """Return the decoder layer of global number `number`."""
        block = f"decoder.block.{number}."
        name, across = block + "layer.0.SelfAttention", block + "layer.1.EncDecAttention"
        attention = Attention(
            qkv=self.column(f"{name}.qkv"),
            out=self.row(f"{name}.o"),
            heads=(self._heads, self._heads, self.architecture.size_per_head),
            scalers=self._scalers(name),
        )
        cross = CrossAttention(
            query=self.column(f"{across}.q"),
            key_value=self.column(f"{across}.k", f"{across}.v"),
            out=self.row(f"{across}.o"),
            heads=self._heads,
            scalers=self._scalers(across, queries=False),
        )
        return T5DecoderLayer(
            self._sublayer(attention, block, "layer.0.", "after_attention_adapter."),
            self._sublayer(cross, block, "layer.1."),
            self._mlp(block, "layer.2."),
        )

    def _sublayer(
        self, part: PartT, block: str, place: str, adapter: str | None = None
    ) -> Sublayer[PartT]:
        return Sublayer(
            part,
            self.norm(f"{block}{place}layer_norm"),
            adapter=self._adapter(block + adapter) if adapter else None,
            bounded=True,
        )

    def _mlp(self, block: str, place: str) -> Sublayer[MLP]:
        name = f"{block}{place}DenseReluDense"
        up = self.up(f"{name}.wi", f"{name}.wi2" if self.architecture.gated else None)
        mlp = MLP(up, self.row(f"{name}.wo"), scalers=self._table(name))
        return self._sublayer(mlp, block, place, "after_ffn_adapter.")

    def _adapter(self, prefix: str) -> Sublayer[MLP] | None:
        if not self.architecture.adapter_inter_size:
            return None
        # A LayerNorm and SiLU whatever the model itself has.
        up = self.column(prefix + "DenseSiluDense.wi", activation="silu")
        mlp = MLP(up, self.row(prefix + "DenseSiluDense.wo"))
        return Sublayer(mlp, self.norm(prefix + "layer_norm", kind="layernorm"))

    def _scalers(self, attention: str, *, queries: bool = True) -> torch.Tensor | None:
        """Return the IA3 tables of keys and values, after ones for queries, (tasks + 1, 3H, D)."""
        key, value = self._table(f"{attention}.k"), self._table(f"{attention}.v")
        if key is None or value is None:
            return None
        ones = [torch.ones_like(key)] if queries else []
        return torch.cat([*ones, key, value], dim=1).view(
            len(key), -1, self.architecture.size_per_head
        )

    def _table(self, name: str) -> torch.Tensor | None:
        """Return an IA3 table with a row of ones for no task, (tasks + 1, width)."""
        if not self.architecture.ia3_num_tasks:
            return None
        table = self.weights.tensor(f"{name}.ia3.weight")
        return torch.cat((table, torch.ones_like(table[:1])))
