"""Decoding steps as CUDA graphs: the launch of one token per lane costs one call, not hundreds.

A graph serves the first B lanes with caches up to S tokens; B and S come in few sizes, so that few
graphs are recorded, each when it is first needed. Lanes without a token in a step compute on a
scratch lane, and nobody reads the result.
"""

# Shapes: B lanes of a graph, S cached tokens it looks at, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inference.decoding.kv_cache import KVCache
from inference.model.decoder import Decoder
from inference.model.layers import cuda_kernels
from inference.model.step import AttentionGroup, Segment, Step, attention_bias

_LEAST_LENGTH = 256
_WARM_UPS = 2  # libraries choose and allocate in the first runs, which must not be recorded


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # (3, B) int64: token ids, positions, lanes to write to
    logits: torch.Tensor  # (B, V) fp32


class DecodeGraphs:
    """The graphs of one rank of a model in one stage; the sums over its ranks are part of them."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None  # memory that all graphs share
        self._kernels = cuda_kernels()

    def run(self, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Return this rank's logits of one new token per lane, (segments, V) fp32, in their order.

        The result is overwritten by the next call.
        """
        lanes = [segment.lane for segment in segments]
        graph = self._graph(max(lanes) + 1, max(segment.stop for segment in segments))
        graph.inputs.copy_(self._inputs(graph.inputs.shape[1], ids, segments), non_blocking=True)
        graph.graph.replay()
        if lanes == list(range(len(lanes))):
            return graph.logits[: len(lanes)]
        return graph.logits[lanes]

    def _inputs(self, width: int, ids: Sequence[int], segments: Sequence[Segment]) -> torch.Tensor:
        """Return (3, width) in pinned memory."""
        rows = [[0] * width, [0] * width, [self._cache.scratch_lane] * width]
        for token, segment in zip(ids, segments, strict=True):
            rows[0][segment.lane] = token
            rows[1][segment.lane] = segment.start
            rows[2][segment.lane] = segment.lane
        return torch.tensor(rows).pin_memory()

    def _graph(self, lanes: int, length: int) -> _Graph:
        size = (
            min(_power_above(lanes), self._cache.shape.lanes),
            min(max(_power_above(length), _LEAST_LENGTH), self._cache.shape.max_len),
        )
        if size not in self._graphs:
            self._graphs[size] = self._record(*size)
        return self._graphs[size]

    def _record(self, lanes: int, length: int) -> _Graph:
        inputs = torch.zeros(3, lanes, dtype=torch.int64, device=self._model.device)
        inputs[2] = self._cache.scratch_lane
        side = torch.cuda.Stream(self._model.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(inputs, length)
        torch.cuda.current_stream(self._model.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL look at their events meanwhile, which must not end the recording.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            logits = self._forward(inputs, length)
        self._pool = graph.pool()
        return _Graph(graph, inputs, logits)

    def _forward(self, inputs: torch.Tensor, length: int) -> torch.Tensor:
        ids, positions, lanes = inputs.unbind(0)
        count, rules = len(ids), self._model.rules
        cache_rows = self._cache.token_rows(lanes, positions)
        groups: tuple[AttentionGroup, ...] = ()
        fused = None
        if self._kernels is not None:
            fused = self._kernels.FusedAttention(positions, cache_rows, length, rules)
        else:
            bias = attention_bias(positions, 1, length, rules).to(self._model.dtype)
            groups = (AttentionGroup(slice(0, count), 0, count, 1, length, bias, causal=False),)
        step = Step(
            ids=ids,
            positions=positions,
            cache=self._cache,
            cache_rows=cache_rows,
            groups=groups,
            output_rows=torch.arange(count, device=ids.device),
            fused=fused,
        )
        return self._model.logits(self._model.run_layers(self._model.embed(step), step), step)


def _power_above(value: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()
