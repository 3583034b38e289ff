"""Steps with prompts as CUDA graphs: one launch for any mixture of chunks and single tokens.

A host takes longer to launch the kernels of a small model one by one than a GPU to run them. A
graph serves steps of up to N tokens; its attention has as many programs as the worst mixture of N
tokens needs, and those without work end at once. Import this module only where Triton is installed.
"""

# Shapes: N tokens of a graph, E hidden

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from inference.model.decoder import Decoder
from inference.model.gpu.attention import PagedAttention
from inference.model.gpu.attention_layout import AttentionArrays, tile_sizes, tiles_of
from inference.model.gpu.recording import record_graph, record_sizes, token_graph_sizes
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import Segment, Step, segment_numbers
from inference.model.token_feed import TokenFeed

_TILE_FIELDS = 4  # slot, place, row and count
# Single tokens of a graph that may have more of them than slots: each program counts them all.
_COUNTED_TOKENS = 512
# Graphs of so few tokens have large tiles for all longer segments of any mixture; shorter ones take
# what is left. A tile that is not used costs a program for each head.
_SHORT_SEGMENT = 16


@dataclass(frozen=True)
class StepLayout:
    """The places of a step's integers in the one buffer that a graph reads."""

    tokens: int
    tiles: tuple[int, int]  # of each size

    @classmethod
    def of(cls, tokens: int, slots: int, tile_sizes: tuple[int, int]) -> StepLayout:
        """Return room for any step of some tokens of at most `slots` sequences."""
        small, large = tile_sizes
        if small == 1 and tokens <= _COUNTED_TOKENS:
            singles, shortest = tokens, _SHORT_SEGMENT + 1
        else:
            singles, shortest = min(tokens, slots), small + 1
        # Most tiles for their tokens are those of the shortest segments, or of segments that just
        # exceed one large tile; every sequence has at most one tile that is not full.
        most = int(tokens / min(shortest, (large + 1) / 2)) + 1
        return cls(tokens, (_rounded(singles), _rounded(min(most, slots + tokens // large))))

    @property
    def lengths(self) -> list[int]:
        """The lengths of ids, shifts, slots, places, output rows, and tiles' fields."""
        return [self.tokens] * 5 + [count for count in self.tiles for _ in range(_TILE_FIELDS)]

    def split(self, buffer: Any) -> list[Any]:
        """Return the parts of an array or tensor."""
        ends = np.cumsum([0, *self.lengths])
        return [buffer[start:stop] for start, stop in pairwise(ends)]


def _rounded(count: int) -> int:
    return -(-count // 4) * 4  # every part begins at a multiple of 16 bytes


@dataclass(frozen=True)
class _PromptGraph:
    graph: torch.cuda.CUDAGraph
    layout: StepLayout
    inputs: torch.Tensor
    step: Step
    output: torch.Tensor  # (N, E)


class PromptGraphs:
    """The graphs of a rank that holds all layers of a decoder-only model."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        feed: TokenFeed,
        *,
        group: int,
        parameters: int,
        most: int,
    ) -> None:
        """Record nothing yet.

        `group` are the query heads of a key/value head, `parameters` those of this rank's layers,
        `most` the tokens of the largest step.
        """
        self._model, self._cache, self._feed = model, cache, feed
        self._tile_sizes = tile_sizes(group, model.rules)
        self._sizes = token_graph_sizes(parameters, most=most)
        self._graphs: dict[int, _PromptGraph] = {}

    def record(self) -> None:
        """Record every size; all ranks do so at the same time."""
        self._graphs = record_sizes(self._sizes, self._record, "steps with prompts")

    def hold(self, tokens: int) -> bool:
        """Return whether a graph is large enough for a step."""
        return bool(self._sizes) and tokens <= self._sizes[-1]

    def run(
        self, ids: Array, segments: Sequence[Segment], output_rows: Array
    ) -> tuple[torch.Tensor, Step]:
        """Run a step; return the last layer's output (tokens, E) and a step with the output rows.

        The output is valid until the next step. Segments are in the order of their tokens; an id is
        NEWEST where the slot's last step chose it.
        """
        count = len(ids)
        each = self._graphs[next(size for size in self._sizes if size >= count)]
        numbers = segment_numbers(segments)
        arrays = AttentionArrays.of(numbers, self._tile_sizes, room=each.layout.tiles[1])
        shifts = np.repeat([segment.shift for segment in segments], numbers[:, 2])
        packed = np.zeros(len(each.inputs), np.int32)
        parts = each.layout.split(packed)
        parts[2][:] = self._cache.scratch_slot
        values = [ids, shifts, arrays.slots, arrays.places, output_rows]
        for tiles in arrays.tiles:
            values += list(tiles)
        for part, value in zip(parts, values, strict=True):
            part[: len(value)] = value
        each.inputs.copy_(on_device(packed, each.inputs.device))
        each.graph.replay()
        rows = each.layout.split(each.inputs)[4][: len(output_rows)]
        return each.output[:count], replace(each.step, output_rows=rows)

    def _record(self, size: int, pool: Any) -> _PromptGraph:
        layout = StepLayout.of(size, self._cache.shape.slots, self._tile_sizes)
        device = self._model.device
        inputs = torch.zeros(sum(layout.lengths), dtype=torch.int32, device=device)
        ids, shifts, slots, places, rows, *tiled = layout.split(inputs)
        slots.fill_(self._cache.scratch_slot)
        tiles = tiles_of(tiled, self._tile_sizes)
        attention = PagedAttention(slots, places, self._cache, tiles, self._model.rules)

        def forward() -> tuple[Step, torch.Tensor]:
            step = Step(
                ids=self._feed.ids(ids, slots),
                positions=places + shifts,
                output_rows=rows,
                attention=attention,
            )
            return step, self._model.run_layers(self._model.embed(step), step)

        graph, (step, output) = record_graph(forward, device, pool)
        return _PromptGraph(graph, layout, inputs, step, output)
