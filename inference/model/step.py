"""Inputs of one forward pass: the flat tokens of several sequences, and their attention.

The tokens of all sequences form one list, over which every linear runs once per layer. Only
attention distinguishes the sequences.
"""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, S cached tokens, H heads

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inference.model.kv_cache import Array
from inference.model.rotary import Angles, AnglesOf


class Segment(NamedTuple):
    """New tokens of one sequence, stored in `slot` from index `start` on.

    A token's position is its index plus `shift`: the number of tokens that the slot has dropped,
    plus `rotary.position_shift`.
    """

    slot: int
    start: int
    tokens: int
    shift: int = 0

    @property
    def stop(self) -> int:
        """Cached tokens of the slot after the step."""
        return self.start + self.tokens


def segment_numbers(segments: Sequence[Segment]) -> Array:
    """Return slot, start, tokens and shift of each segment, (B, 4) int64."""
    return np.array(segments, np.int64).reshape(-1, 4)


def token_places(segments: Array) -> tuple[Array, Array]:
    """Return slot and index in the slot of each token of segments (B, 3 or 4), (N,) each."""
    slots, starts, counts = segments.T[:3]
    rows = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.repeat(starts - rows, counts) + np.arange(counts.sum())


@dataclass(frozen=True)
class AttentionRules:
    """Scores and visibility of attention in a stage's layers.

    A score is q.k times `scale`, capped, plus the bias of ALiBi or of a table.
    """

    alibi_slopes: Tensor | None = None  # (H,) of this rank's heads
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # whether each local layer slides; None: all do
    distance_bias: Tensor | None = None  # (H, distances back); the last entry also for longer ones
    causal: bool = True  # a token does not see later ones
    scale: float | None = None  # None: 1 / sqrt(D)
    softcap: float | None = None  # a score becomes cap * tanh(score / cap)
    batch_invariant: bool = False  # a token's result does not depend on the step, to the bit
    group: int = 1  # query heads per key/value head

    @property
    def across(self) -> AttentionRules:
        """The rules of attention over an encoder's output, all of which is visible."""
        return replace(self, distance_bias=None, causal=False)

    def window(self, layer: int) -> int | None:
        """Return the number of positions a query sees, its own included, or None for all."""
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if slides else None


class CachedAttention(Protocol):
    """Attention of a step's tokens over their sequences in the cache."""

    rotates: ClassVar[bool]  # whether it applies the rotary embedding itself

    def of_rows(self, rows: Tensor) -> CachedAttention:
        """Return the attention of the tokens at `rows` (n,); other results are undefined."""
        ...

    def __call__(
        self,
        query: Tensor,
        *,
        layer: int,
        new: Tensor | None = None,
        angles: Angles | None = None,
    ) -> Tensor:
        """Return (N, H*D) for queries (N, H, D); new keys and values are stored first.

        Args:
            query: Contiguous heads; may be rotated in place.
            layer: Layer of the cache.
            new: Keys and values of the tokens, (N, 2 * K, D); None if the cache has them already.
            angles: Rotation to apply to queries and keys, None for none.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one forward pass, or hidden states if the client computes the embeddings.

    With `has_virtual`, ids from the vocabulary's end on refer to rows of the loaded prompt tables,
    followed by those of `embeddings`.
    """

    ids: Tensor  # (N,), or hidden states (N, E)
    positions: Tensor  # (N,)
    has_virtual: bool = False
    embeddings: Tensor | None = None  # (rows, hidden)


@dataclass(frozen=True, kw_only=True)
class Step(Tokens):
    """The inputs of one forward pass of a decoder.

    `output_rows` are the tokens whose logits are wanted; with `outputs_only` the last layer may
    compute only these. `selected` are the tokens whose output a layer computes, None for all.
    `encoded`, if set, is attention over the encoder's whole output.
    """

    output_rows: Tensor  # (n,)
    attention: CachedAttention
    outputs_only: bool = False
    selected: Tensor | None = None
    encoded: CachedAttention | None = None
    tasks: Tensor | None = None  # IA3 task of each token (N,), None without IA3
    angles: AnglesOf = field(default_factory=dict)


def attention_bias(
    starts: Tensor,
    new_tokens: int,
    length: int,
    rules: AttentionRules,
    window: int | None = None,
) -> Tensor:
    """Return the bias on the attention scores of slots with `new_tokens` tokens each.

    It is (B, 1 or H, Q, S) fp32: zero or the position bias for visible tokens, -inf elsewhere.
    `starts` (B,) are the positions of the slots' first new tokens. `window` is the number of
    positions that a query sees, None for all; it replaces the windows of `rules`.
    """
    device = starts.device
    queries = starts.unsqueeze(1) + torch.arange(new_tokens, device=device)  # (B, Q)
    distance = queries.unsqueeze(2) - torch.arange(length, device=device)  # (B, Q, S)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if rules.distance_bias is not None:
        table = rules.distance_bias.float()
        bias = table[:, distance.clamp(0, table.shape[1] - 1)].transpose(0, 1)  # (B, H, Q, S)
    elif rules.alibi_slopes is None:
        bias = torch.zeros(distance.shape, device=device).unsqueeze(1)  # (B, 1, Q, S)
    else:
        slopes = rules.alibi_slopes.view(1, -1, 1, 1)
        bias = -slopes * distance.unsqueeze(1).float()  # (B, H, Q, S)
    return bias.masked_fill(hidden.unsqueeze(1), float("-inf"))
