"""Inputs of one forward pass: the flat tokens of several sequences, and their attention groups.

The tokens of all sequences are one list, and every linear runs once per layer. Only attention
distinguishes the sequences, in groups that one fused call can serve.
"""

# Shapes: N tokens of the step, B slots of a group, Q new tokens per slot, S cached tokens, H heads

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np
import torch

from inference.model.kv_cache import Array, KVCache
from inference.model.rotary import Angles, AnglesOf


@dataclass(slots=True)
class Segment:
    """New tokens of one sequence: `count` of them from place `start` of `slot` on.

    A token's position is its place there, shifted: by the tokens that the slot has forgotten, and
    see `rotary.position_shift`.
    """

    slot: int
    start: int
    count: int
    shift: int = 0

    @property
    def stop(self) -> int:
        """Cached tokens of the slot after the step."""
        return self.start + self.count


def segment_numbers(segments: Sequence[Segment]) -> Array:
    """Return slot, start and count of each segment, (B, 3) int64."""
    numbers = np.array([(s.slot, s.start, s.count) for s in segments], np.int64)
    return numbers.reshape(-1, 3)


def token_places(segments: Array) -> tuple[Array, Array]:
    """Return the slot of each token of segments (B, 3), and its place there, (N,) each."""
    slots, starts, counts = segments.T
    rows = np.cumsum(counts) - counts
    return np.repeat(slots, counts), np.repeat(starts - rows, counts) + np.arange(counts.sum())


@dataclass(frozen=True)
class AttentionRules:
    """Scores of attention in a stage's layers, and what each token sees.

    A score is q.k times `scale`, capped, plus the bias of ALiBi or of a table.
    """

    alibi_slopes: torch.Tensor | None = None  # (H,) of this rank's heads
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # whether a local layer has it; None: all
    # (H, D): bias by distance back, the last entry for all that are farther.
    distance_bias: torch.Tensor | None = None
    causal: bool = True  # a token does not see those after it
    scale: float | None = None  # None: 1 / sqrt(D)
    softcap: float | None = None  # a score becomes cap * tanh(score / cap)
    batch_invariant: bool = False  # the bits of a token's result do not depend on the step

    @property
    def across(self) -> AttentionRules:
        """The rules of attention over an encoder's output, all of which is seen."""
        return replace(self, distance_bias=None, causal=False)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The windows of the layers; `window_index` says which of them a layer has."""
        return (
            (self.sliding_window,) if self.sliding_layers is None else (None, self.sliding_window)
        )

    def window_index(self, layer: int) -> int:
        """Return the place in `windows` of a local layer's window."""
        return 0 if self.sliding_layers is None else int(self.sliding_layers[layer])

    def window(self, layer: int) -> int | None:
        """Return the positions that a query of a local layer sees, its own included."""
        return self.windows[self.window_index(layer)]


@dataclass(frozen=True)
class AttentionMask:
    """The tokens that the queries of a group see.

    No query sees the `first` cached tokens. `bias` is added to the scores of the others, (B or 1,
    H or 1, Q, S), -inf where a token may not look; None lets every new token see all of them, or
    with `causal` those before it.
    """

    bias: torch.Tensor | None
    causal: bool
    first: int = 0


@dataclass(frozen=True)
class AttentionGroup:
    """Slots side by side with as many new tokens each: one attention call.

    `masks` are those of the rules' windows. `cached` holds the keys and values (B, K, S, D) of each
    layer where they are views of the cache.
    """

    rows: slice  # of the step's tokens
    slot: int
    slot_count: int
    new_tokens: int
    length: int
    rules: AttentionRules
    masks: tuple[AttentionMask, ...]
    cached: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None


class CachedAttention(Protocol):
    """Attention of a step's tokens over what the cache has of their sequences."""

    rotates: ClassVar[bool]  # whether it rotates queries and keys itself

    def __call__(
        self,
        query: torch.Tensor,
        *,
        layer: int,
        new: torch.Tensor | None = None,
        angles: Angles | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N, H*D) for queries (N, H, D); new keys and values are stored first.

        Args:
            query: Heads side by side; rotated where it lies, or left as it is.
            layer: Of the cache.
            new: Keys and values of the tokens themselves, (N, 2 * K, D); None where the cache has
                all.
            angles: Rotation of queries and keys, None for models without, or where it is done.
            out: Receives the result; may be the queries' own memory.
        """
        ...


@dataclass(frozen=True)
class Step:
    """The inputs of one forward pass.

    `output_rows` are the tokens whose logits are wanted. With `has_virtual`, ids from the
    vocabulary's end on name rows of the loaded prompt tables and, after those, of `embeddings`.
    `encoded`, if given, is attention over the encoder's output, all of which a token sees.
    """

    ids: torch.Tensor  # (N,)
    positions: torch.Tensor  # (N,)
    output_rows: torch.Tensor  # (n,)
    attention: CachedAttention
    has_virtual: bool = False
    embeddings: torch.Tensor | None = None  # (rows, hidden)
    encoded: CachedAttention | None = None
    tasks: torch.Tensor | None = None  # IA3 task of each token (N,), None without IA3
    angles: AnglesOf = field(default_factory=dict)  # of the tokens


def attention_groups(
    segments: Sequence[Segment], rules: AttentionRules, dtype: torch.dtype, cache: KVCache
) -> tuple[AttentionGroup, ...]:
    """Return the attention calls of segments, in the order of their tokens, slots ascending."""
    groups = []
    for first_row, run in _parts(segments):
        group = _group(run, first_row, rules, dtype, cache.device)
        if cache.shape.is_whole:
            # All layers at once: a view for each layer would cost more than a small product.
            group = replace(group, cached=cache.views(group.slot, group.slot_count, group.length))
        groups.append(group)
    return tuple(groups)


def _parts(segments: Sequence[Segment]) -> Iterator[tuple[int, list[Segment]]]:
    """Split the segments into runs for one attention call each; yield (first row, run)."""
    row = 0
    run: list[Segment] = []
    for segment in segments:
        if run and not _fits(run, segment):
            yield row, run
            row += sum(s.count for s in run)
            run = []
        run.append(segment)
    if run:
        yield row, run


# The padded work stays below this multiple of the true work, or it adds fewer tokens than a
# further call costs.
_MOST_PADDED = 1.25
_CALL_TOKENS = 256


def may_share_call(lengths: Sequence[int]) -> bool:
    """Return whether sequences of these lengths are padded to the longest, for one call."""
    padded, true = max(lengths) * len(lengths), sum(lengths)
    return padded - true <= _CALL_TOKENS or padded <= _MOST_PADDED * true


def _fits(run: list[Segment], segment: Segment) -> bool:
    if segment.count != 1 or run[-1].count != 1 or segment.slot != run[-1].slot + 1:
        return False
    return may_share_call([each.stop for each in (*run, segment)])


def _group(
    run: list[Segment],
    first_row: int,
    rules: AttentionRules,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    new_tokens, length = run[0].count, max(s.stop for s in run)
    # A window that holds the longest context hides nothing.
    reach = [window if window is None or window < length else None for window in rules.windows]
    masks = {window: _mask(run, window, rules, dtype, device) for window in dict.fromkeys(reach)}
    rows = slice(first_row, first_row + len(run) * new_tokens)
    return AttentionGroup(
        *(rows, run[0].slot, len(run), new_tokens, length, rules),
        masks=tuple(masks[window] for window in reach),
    )


def _mask(
    run: list[Segment],
    window: int | None,
    rules: AttentionRules,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionMask:
    new_tokens, length = run[0].count, max(s.stop for s in run)
    even = all(s.stop == length for s in run)
    first = 0 if window is None else max(min(s.start for s in run) + 1 - window, 0)
    if rules.alibi_slopes is None and rules.distance_bias is None and even:
        if new_tokens == 1 or not rules.causal:
            return AttentionMask(None, causal=False, first=first)
        # Capped attention takes no flag.
        if run[0].start == 0 and window is None and rules.softcap is None:
            return AttentionMask(None, causal=True)
    starts = torch.tensor([s.start - first for s in run], device=device)
    bias = attention_bias(starts, new_tokens, length - first, rules, window)
    return AttentionMask(bias.to(dtype), causal=False, first=first)


def attention_bias(
    starts: torch.Tensor,
    new_tokens: int,
    length: int,
    rules: AttentionRules,
    window: int | None = None,
) -> torch.Tensor:
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
