"""Inputs of one forward pass: the flat tokens of several sequences, and what their attention is.

The tokens of all sequences are one list, and every linear runs once per layer. Only attention
distinguishes the sequences.
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
    """New tokens of one sequence, from place `start` of `slot` on.

    A token's position is its place there, shifted: by the tokens that the slot has forgotten, and
    see `rotary.position_shift`.
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
    """Return the slot of each token of segments (B, 3 or 4), and its place there, (N,) each."""
    slots, starts, counts = segments.T[:3]
    rows = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.repeat(starts - rows, counts) + np.arange(counts.sum())


@dataclass(frozen=True)
class AttentionRules:
    """Scores of attention in a stage's layers, and what each token sees.

    A score is q.k times `scale`, capped, plus the bias of ALiBi or of a table.
    """

    alibi_slopes: Tensor | None = None  # (H,) of this rank's heads
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # whether a local layer has it; None: all
    # (H, D): bias by distance back, the last entry for all that are farther.
    distance_bias: Tensor | None = None
    causal: bool = True  # a token does not see those after it
    scale: float | None = None  # None: 1 / sqrt(D)
    softcap: float | None = None  # a score becomes cap * tanh(score / cap)
    batch_invariant: bool = False  # the bits of a token's result do not depend on the step
    group: int = 1  # query heads of a key/value head

    @property
    def across(self) -> AttentionRules:
        """The rules of attention over an encoder's output, all of which is seen."""
        return replace(self, distance_bias=None, causal=False)

    def window(self, layer: int) -> int | None:
        """Return the positions that a query of a local layer sees, its own included; None: all."""
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if slides else None


class CachedAttention(Protocol):
    """Attention of a step's tokens over what the cache has of their sequences."""

    rotates: ClassVar[bool]  # whether it rotates queries and keys itself

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
            query: Heads side by side; rotated where it lies, or left as it is.
            layer: Of the cache.
            new: Keys and values of the tokens themselves, (N, 2 * K, D); None where the cache has
                all.
            angles: Rotation of queries and keys, None for models without, or where it is done.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of one forward pass, or their states where a model's embeddings run outside.

    With `has_virtual`, ids from the vocabulary's end on name rows of the loaded prompt tables and,
    after those, of `embeddings`.
    """

    ids: Tensor  # (N,), of states (N, E)
    positions: Tensor  # (N,)
    has_virtual: bool = False
    embeddings: Tensor | None = None  # (rows, hidden)


@dataclass(frozen=True, kw_only=True)
class Step(Tokens):
    """The inputs of one forward pass of a decoder.

    `output_rows` are the tokens whose logits are wanted; the last layer may compute these alone
    where `narrows`. `kept`, of a layer's step, are the tokens whose output it computes, None for
    all. `encoded`, if given, is attention over the encoder's output, all of which a token sees.
    """

    output_rows: Tensor  # (n,)
    attention: CachedAttention
    narrows: bool = False
    kept: Tensor | None = None
    encoded: CachedAttention | None = None
    tasks: Tensor | None = None  # IA3 task of each token (N,), None without IA3
    angles: AnglesOf = field(default_factory=dict)  # of the tokens


def attention_bias(
    starts: Tensor,
    new_tokens: int,
    length: int,
    rules: AttentionRules,
    window: int | None = None,
) -> Tensor:
    """Return the addition to the attention scores of slots with as many new tokens each.

    Zero or the position bias for visible tokens, -inf elsewhere: (B, 1 or H, Q, S) fp32.

    `starts` (B,) are the positions of the slots' first new tokens, `window` the positions that a
    query sees, None for all; the windows of `rules` are not looked at.
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
