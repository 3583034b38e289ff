"""T5 layers, and the parts that only they have: attention over the encoder's output; adapters.

`scalers` are those of IA3, see `layers.scaled`.
"""

# Shapes: N tokens, E hidden, H local heads, D head size, F local MLP width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference.model.cached_attention import EncodedSlots, attend_cached
from inference.model.kv_cache import KVCache
from inference.model.layers import MLP, Attention, Normalise, RowAttention, scaled
from inference.model.ragged import RaggedRows, RowMasks
from inference.model.step import Step
from inference.parallel.linear import ColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class CrossAttention:
    """Attention of the decoder over the encoder's output, whose keys and values are cached."""

    query: ColumnParallelLinear
    key_value: ColumnParallelLinear  # all keys, then all values
    out: RowParallelLinear
    heads: int
    scalers: torch.Tensor | None  # (tasks + 1, 2, H, D)

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
        both = self.key_value(encoded).view(len(encoded), 2, self.heads, -1)
        cache.write(layer, cache_rows, scaled(both, self.scalers, tasks))

    def __call__(
        self,
        x: torch.Tensor,
        encoded: EncodedSlots,
        cache: KVCache,
        *,
        layer: int,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (N, E) for normalised x (N, E)."""
        query = self.query(x).view(len(x), self.heads, -1)  # (N, H, D)
        if encoded.paged is not None:
            mixed = encoded.paged(query, cache, layer=layer)
        else:
            mixed = attend_cached(query, encoded.groups, cache, layer)
        return self.out(mixed, residual)


@dataclass(frozen=True)
class LinearAdapter:
    """A bottleneck added to a sublayer's output before the residual is."""

    # Order: FasterTransformer, layers/adapter_layers/LinearAdapterLayer.cc (df4a753).
    norm: Normalise
    wi: ColumnParallelLinear  # with its activation
    wo: RowParallelLinear

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Return y plus its adaptation, (N, E)."""
        return self.wo(self.wi(self.norm(y)), y)


@dataclass(frozen=True)
class T5EncoderLayer:
    """One encoder layer, norms before each half."""

    attention_norm: Normalise
    attention: RowAttention
    attention_adapter: LinearAdapter | None
    mlp_norm: Normalise
    mlp: MLP
    mlp_adapter: LinearAdapter | None

    def attend(
        self,
        x: torch.Tensor,
        rows: RaggedRows,
        masks: RowMasks,
        tasks: torch.Tensor | None,
        weights_out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return x + attention, (N, E)."""

        def run(residual: torch.Tensor | None) -> torch.Tensor:
            return self.attention(
                self.attention_norm(x),
                rows,
                masks,
                tasks=tasks,
                weights_out=weights_out,
                residual=residual,
            )

        return _join(x, run, self.attention_adapter)

    def feed_forward(self, x: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        """Return x + MLP, (N, E)."""
        return _feed_forward(x, self.mlp_norm, self.mlp, self.mlp_adapter, tasks)


@dataclass(frozen=True)
class T5DecoderLayer:
    """One decoder layer, norms before each third."""

    attention_norm: Normalise
    attention: Attention
    attention_adapter: LinearAdapter | None
    cross_norm: Normalise
    cross: CrossAttention
    mlp_norm: Normalise
    mlp: MLP
    mlp_adapter: LinearAdapter | None

    def attend(
        self, x: torch.Tensor, step: Step, layer: int, tasks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x + self-attention, (N, E)."""

        def run(residual: torch.Tensor | None) -> torch.Tensor:
            h = self.attention_norm(x)
            return self.attention(h, step, layer=layer, tasks=tasks, residual=residual)

        return _join(x, run, self.attention_adapter)

    def cross_attend(
        self, x: torch.Tensor, encoded: EncodedSlots, cache: KVCache, layer: int
    ) -> torch.Tensor:
        """Return x + attention over the encoder's output, (N, E)."""
        return self.cross(self.cross_norm(x), encoded, cache, layer=layer, residual=x)

    def feed_forward(self, x: torch.Tensor, tasks: torch.Tensor | None) -> torch.Tensor:
        """Return x + MLP, (N, E)."""
        return _feed_forward(x, self.mlp_norm, self.mlp, self.mlp_adapter, tasks)


def _feed_forward(
    x: torch.Tensor,
    norm: Normalise,
    mlp: MLP,
    adapter: LinearAdapter | None,
    tasks: torch.Tensor | None,
) -> torch.Tensor:
    def run(residual: torch.Tensor | None) -> torch.Tensor:
        return mlp(norm(x), tasks=tasks, residual=residual)

    return _join(x, run, adapter)


def _join(
    x: torch.Tensor,
    sublayer: Callable[[torch.Tensor | None], torch.Tensor],
    adapter: LinearAdapter | None,
) -> torch.Tensor:
    """Return x plus a sublayer's output, which is adapted before the residual is added."""
    return sublayer(x) if adapter is None else x + adapter(sublayer(None))
