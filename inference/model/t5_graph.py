"""A T5 decoder's stage as CUDA graphs record it."""

# Shapes: B lanes of a graph, R numbers of a lane, E hidden, V vocabulary

from __future__ import annotations

import torch

from inference.model.cached_attention import EncodedLanes
from inference.model.decode_graph import LaneAttention, lane_step
from inference.model.encoder_decoder import DecoderStep, EncoderDecoder
from inference.model.kv_cache import KVCache
from inference.model.step import AttentionRules
from inference.parallel.layout import ParallelLayout


class EncoderDecoderGraphModel:
    """One new token in each lane, of rows without IA3.

    The numbers of a lane: its token, the token's place, the lane to write to, and how many tokens
    of the encoder it reads.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        cache: KVCache,
        cross_cache: KVCache,
        layout: ParallelLayout,
    ) -> None:
        """Take a stage and its caches of what was generated and of what was encoded."""
        self.layout, self.cache, self.device = layout, cache, model.device
        self.idle: tuple[int, ...] = (0, 0, cache.scratch_lane, 1)
        self._model = model
        self._cross_cache = cross_cache
        self._attention = LaneAttention(
            lanes=cache.shape.lanes,
            heads=cache.shape.kv_head_num,
            dtype=model.dtype,
            device=model.device,
        )

    def room(self, lanes: int) -> torch.Tensor:
        """Return an empty (lanes, E), to receive hidden states in."""
        return self._model.room(lanes)

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Return the stage's output, see `GraphModel`."""
        ids, places, lanes, encoded = numbers.unbind(0)
        attention = self._attention(places, length, self._model.rules)
        step = lane_step(ids, places, self.cache, (lanes, places), attention)
        fused, groups = self._attention(encoded, length, AttentionRules(), new=False)
        inputs = DecoderStep(step, EncodedLanes(groups, fused))
        x = self._model.embed_step(inputs) if hidden is None else hidden
        x = self._model.run_decoder(x, inputs, self.cache, self._cross_cache)
        return self._model.logits(x) if self.layout.is_last_stage else x
