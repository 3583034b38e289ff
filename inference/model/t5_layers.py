"""T5 layers, and the parts that only they have: attention over the encoder's output; adapters.

`scalers` are those of IA3, see `layers.scaled`.
"""

# Shapes: N tokens, E hidden, H local heads, D head size, F local MLP width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from inference.model.cached_attention import EncodedSlots, attend_cached
from inference.model.kv_cache import KVCache
from inference.model.layers import MLP, Attention, Normalise, RowAttention, scaled
from inference.model.ragged import RowMasks
from inference.model.step import Step
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
        self,
        x: torch.Tensor,
        encoded: EncodedSlots,
        cache: KVCache,
        *,
        layer: int,
        residual: torch.Tensor | None = None,
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
    wi: Product  # with its activation
    wo: RowParallelLinear

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        """Return y plus its adaptation, (N, E)."""
        return self.wo(self.wi(self.norm(y)), y)


# Half precision ends at 65504, which the residual stream of T5 in fp16 is known to exceed.
_FP16_LIMIT = 64504.0

PartT = TypeVar("PartT", bound=Callable[..., torch.Tensor])


@dataclass(frozen=True)
class Sublayer(Generic[PartT]):
    """A part of a layer with the norm before it, an adapter after it, and the residual."""

    norm: Normalise
    part: PartT
    adapter: LinearAdapter | None = None

    def __call__(self, x: torch.Tensor, *inputs: Any, **more: Any) -> torch.Tensor:
        """Return x plus what the part makes of the normalised x and its other inputs, (N, E)."""
        h = self.norm(x)
        if self.adapter is None:
            x = self.part(h, *inputs, residual=x, **more)
        else:
            x = x + self.adapter(self.part(h, *inputs, **more))
        return x.clamp_(-_FP16_LIMIT, _FP16_LIMIT) if x.dtype == torch.float16 else x


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

    def __call__(
        self,
        x: torch.Tensor,
        step: Step,
        encoded: EncodedSlots,
        layer: int,
        tasks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (N, E) for x (N, E); `layer` numbers the layers of this stage."""
        x = self.attention(x, step, layer=layer, tasks=tasks)
        x = self.cross(x, encoded, step.cache, layer=layer)
        return self.mlp(x, tasks=tasks)
