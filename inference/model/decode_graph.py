"""Decoding steps as CUDA graphs: the launch of one token per lane costs one call, not hundreds.

A graph serves the first B lanes with caches up to S tokens; B and S come in few sizes, so that few
graphs are recorded, each when it is first needed. Lanes without a token in a step compute on a
scratch lane, and nobody reads the result. The best token of each lane is chosen inside the graph:
all that greedy rows bring to the host in a step is one number and its logit.
"""

# Shapes: B lanes of a graph, S cached tokens it looks at, R numbers of a lane, E hidden,
#         V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from inference.model.decoder import Decoder
from inference.model.kv_cache import KVCache
from inference.model.layers import cuda_kernels
from inference.model.step import AttentionGroup, AttentionRules, Step, attention_bias
from inference.parallel.layout import ParallelLayout

_LEAST_LENGTH = 256
_WARM_UPS = 2  # libraries choose and allocate in the first runs, which must not be recorded


class GraphModel(Protocol):
    """What graphs record: one stage of a model, one new token in each lane.

    `idle` are the numbers of a lane without a token, such as the scratch lane to write to.
    """

    layout: ParallelLayout
    cache: KVCache
    device: torch.device
    idle: tuple[int, ...]

    def room(self, lanes: int) -> torch.Tensor:
        """Return an empty (lanes, E), to receive hidden states in."""
        ...

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Return the stage's output (B, E), of the last one its logits (B, V) fp32.

        Args:
            numbers: Of each lane (R, B) int64.
            hidden: Output of the stage before (B, E), None on the first.
            length: No lane sees more tokens.
        """
        ...


@dataclass(frozen=True)
class DecodeGraph:
    """One graph and what it reads and writes."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor  # (R, B) int64
    hidden: torch.Tensor | None  # (B, E), from the stage before
    output: torch.Tensor  # (B, E) or (B, V)
    best: torch.Tensor | None  # (B, 2) int32: bits of the best logit, and its token
    idle: tuple[int, ...]
    host: torch.Tensor  # like numbers, in pinned memory
    ran: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def fill(self, lanes: Sequence[int], *rows: Sequence[int]) -> None:
        """Set the numbers of some lanes, as many rows of them as `idle` has."""
        self.ran.synchronize()  # a step before may not have read its numbers yet
        host = self.host.numpy()
        host[:] = [[number] for number in self.idle]
        host[:, lanes] = rows
        self.numbers.copy_(self.host, non_blocking=True)

    def run(self) -> None:
        """Run the step; `output` and `best` are overwritten."""
        self.graph.replay()
        self.ran.record()


def of_lanes(values: torch.Tensor, lanes: Sequence[int]) -> torch.Tensor:
    """Return the rows of some lanes in their order, without a copy where they are the first."""
    if list(lanes) == list(range(len(lanes))):
        return values[: len(lanes)]
    return values[list(lanes)]


class DecodeGraphs:
    """The graphs of one rank's stage; the sums over the ranks of the stage are part of them."""

    def __init__(self, model: GraphModel) -> None:
        self._model = model
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._pool: Any = None  # memory that all graphs share

    def graph(self, lanes: int, length: int) -> DecodeGraph:
        """Return the graph for the first `lanes` lanes, none of which sees more than `length`."""
        shape = self._model.cache.shape
        size = (
            min(_power_above(lanes), shape.lanes),
            min(max(_power_above(length), _LEAST_LENGTH), shape.max_len),
        )
        if size not in self._graphs:
            self._graphs[size] = self._record(*size)
        return self._graphs[size]

    def _record(self, lanes: int, length: int) -> DecodeGraph:
        model, layout, device = self._model, self._model.layout, self._model.device
        host = torch.tensor([[number] * lanes for number in model.idle]).pin_memory()
        numbers = host.to(device)
        hidden = None if layout.is_first_stage else model.room(lanes).zero_()
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                model.forward(numbers, hidden, length)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL look at their events meanwhile, which must not end the recording.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            output = model.forward(numbers, hidden, length)
            best = _best(output) if layout.world_size == 1 else None
        self._pool = graph.pool()
        return DecodeGraph(graph, numbers, hidden, output, best, model.idle, host)


def _best(logits: torch.Tensor) -> torch.Tensor:
    """Return (B, 2) int32: the bits of each row's best logit, NaN if it has any, and its token."""
    values, ids = logits.max(-1)
    return torch.stack((values.view(torch.int32), ids.int()), dim=1)


def _power_above(value: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (value - 1).bit_length()


class LaneAttention:
    """How the lanes of a graph attend: by the fused kernel, or over masked caches without it."""

    def __init__(self, *, lanes: int, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kernels = cuda_kernels()
        self._tickets = torch.zeros(lanes * heads, dtype=torch.int32, device=device)
        self._dtype = dtype

    def __call__(
        self, cached: torch.Tensor, length: int, rules: AttentionRules, *, new: bool = True
    ) -> tuple[Any, tuple[AttentionGroup, ...]]:
        """Return the step's `FusedAttention` or, for want of it, its groups.

        Args:
            cached: Tokens that each lane sees (B,), the new one aside.
            length: No lane holds more.
            rules: Of the model.
            new: Whether a lane sees the new token as well.
        """
        if self._kernels is not None:
            return self._kernels.FusedAttention(cached, length, rules, self._tickets), ()
        count = len(cached)
        last = cached if new else cached - 1
        bias = attention_bias(last, 1, length, rules).to(self._dtype)
        group = AttentionGroup(slice(0, count), 0, count, 1, length, bias, causal=False)
        return None, (group,)


def lane_step(
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: KVCache,
    stored: tuple[torch.Tensor, torch.Tensor],
    attention: tuple[Any, tuple[AttentionGroup, ...]],
) -> Step:
    """Return the step of one new token for each lane.

    Args:
        ids: Token of each lane (B,).
        positions: Position of each (B,).
        cache: Where keys and values go.
        stored: Lane to write to, and place in it, of each token (B,).
        attention: What `LaneAttention` returned.
    """
    fused, groups = attention
    return Step(
        ids=ids,
        positions=positions,
        cache=cache,
        cache_rows=cache.token_rows(*stored),
        groups=groups,
        output_rows=torch.arange(len(ids), device=ids.device),
        fused=fused,
    )


class DecoderGraphModel:
    """A decoder-only model's stage.

    The numbers of a lane: its token, the token's position, its place among what the lane has
    cached, and the lane to write to.
    """

    def __init__(self, model: Decoder, cache: KVCache, layout: ParallelLayout) -> None:
        self.layout, self.cache, self.device = layout, cache, model.device
        self.idle: tuple[int, ...] = (0, 0, 0, cache.scratch_lane)
        self._model = model
        heads = model.architecture.head_num // layout.tp_size
        self._attention = LaneAttention(
            lanes=cache.shape.lanes, heads=heads, dtype=model.dtype, device=model.device
        )

    def room(self, lanes: int) -> torch.Tensor:
        """Return an empty (lanes, E), to receive hidden states in."""
        hidden = self._model.architecture.hidden
        return torch.empty(lanes, hidden, dtype=self._model.dtype, device=self.device)

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Return the stage's output, see `GraphModel`."""
        ids, positions, places, lanes = numbers.unbind(0)
        attention = self._attention(places, length, self._model.rules)
        step = lane_step(ids, positions, self.cache, (lanes, places), attention)
        x = self._model.embed(step) if hidden is None else hidden
        x = self._model.run_layers(x, step)
        return self._model.logits(x, step) if self.layout.is_last_stage else x
