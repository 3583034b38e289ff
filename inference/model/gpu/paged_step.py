"""Layout of a step for the GPU's kernels; import this module only where Triton is installed."""

# Shapes: N tokens of the step, n tokens whose logits are wanted

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inference.model.gpu.attention_layout import paged_attention
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import AttentionRules, EncodedSlots, Segment, Step, segment_numbers
from inference.model.token_feed import TokenFeed


def make_paged_step(
    ids: Array,
    segments: Sequence[Segment],
    output_rows: Array,
    *,
    cache: KVCache,
    rules: AttentionRules,
    group: int,
    feed: TokenFeed,
    has_virtual: bool = False,
    embeddings: torch.Tensor | None = None,
    encoded: EncodedSlots | None = None,
    tasks: torch.Tensor | None = None,
) -> Step:
    """Lay out a `Step` without waiting for the device.

    Segments are in the order of their tokens; an id is NEWEST where `feed` holds what the slot's
    last step chose. `group` are the query heads of a key/value head.
    """
    device = cache.tables.device
    places = segment_numbers(segments)
    attention = paged_attention(places, rules=rules, group=group, device=device, cache=cache)
    shifts = np.repeat([segment.shift for segment in segments], places[:, 2])
    sent = on_device(np.concatenate((ids, shifts, output_rows)).astype(np.int32), device)
    count = len(ids)
    return Step(
        ids=feed.ids(sent[:count], attention.slots),
        positions=attention.places + sent[count : 2 * count],
        cache=cache,
        output_rows=sent[2 * count :],
        has_virtual=has_virtual,
        embeddings=embeddings,
        paged=attention,
        encoded=encoded,
        tasks=tasks,
    )
