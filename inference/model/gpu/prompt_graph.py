"""Steps with prompts as CUDA graphs: one launch for any mixture of chunks and single tokens.

For a small model, launching the kernels one by one takes the host longer than the GPU needs to run
them. A graph serves steps of up to N tokens; its attention has enough programs for the worst
mixture of N tokens, and programs without work return at once. Import this module only where Triton
is installed.
"""

# Shapes: N tokens of a graph, E hidden

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from inference.model.decoder import Decoder
from inference.model.gpu.attention import PagedAttention
from inference.model.gpu.attention_layout import (
    cut_tiles,
    pack,
    part_starts,
    split,
    tile_sizes,
    tiles_of,
)
from inference.model.gpu.recording import SizedGraphs, record_graph, token_graph_sizes
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import Segment, Step, segment_numbers, token_places
from inference.model.token_feed import TokenFeed

_TILE_FIELDS = 4  # slot, place, row and count
# Graphs of up to so many tokens have a single-token tile for each, which may exceed the slots. Not
# more, since each program of attention goes through all of them.
_COUNTED_TOKENS = 512
# Such graphs have enough large tiles for all segments that are longer than this; shorter ones may
# be served token by token. An unused tile costs one program per head.
_SHORT_SEGMENT = 16


def tile_room(tokens: int, slots: int, tile_sizes: tuple[int, int]) -> tuple[int, int]:
    """Return how many tiles of each size suffice for every step of `tokens` tokens in `slots`."""
    small, large = tile_sizes
    if small == 1 and tokens <= _COUNTED_TOKENS:
        singles, shortest = tokens, _SHORT_SEGMENT + 1
    else:
        singles, shortest = min(tokens, slots), small + 1
    # The shortest segments need the most tiles per token, or segments that just exceed one large
    # tile; every sequence has at most one partly filled tile.
    most = int(tokens / min(shortest, (large + 1) / 2)) + 1
    return singles, min(most, slots + tokens // large)


@dataclass(frozen=True)
class _PromptGraph:
    graph: torch.cuda.CUDAGraph
    # Ids, shifts, slots, places, output rows, and four fields for each size of tiles.
    lengths: list[int]
    inputs: torch.Tensor
    step: Step
    output: torch.Tensor  # (N, E)


class PromptGraphs(SizedGraphs):
    """The graphs of a rank with all layers of a decoder-only model."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        feed: TokenFeed,
        *,
        parameters: int,
        most: int,
    ) -> None:
        """Prepare; `record` records the graphs.

        `parameters` is the number of parameters of this rank's layers, `most` the number of tokens
        of the largest step.
        """
        self._model, self._cache, self._feed = model, cache, feed
        self._tile_sizes = tile_sizes(model.rules, cache.shape.size_per_head)
        super().__init__(token_graph_sizes(parameters, most=most), "steps with prompts")

    def run(
        self, ids: Array, segments: Sequence[Segment], output_rows: Array
    ) -> tuple[torch.Tensor, Step] | None:
        """Run a step; return the last layer's output (tokens, E) and a step with the output rows.

        None if no graph is large enough. The output is valid until the next step. Segments are in
        the order of their tokens; NEWEST stands for an id that the slot's last step chose.
        """
        each = self.holding(len(ids))
        if each is None:
            return None
        numbers = segment_numbers(segments)
        shifts = np.repeat(numbers[:, 3], numbers[:, 2])
        slots, places = token_places(numbers)
        unused = np.full(each.lengths[2] - len(slots), self._cache.scratch_slot)
        tiles = cut_tiles(numbers, self._tile_sizes, room=each.lengths[-1])
        values = [ids, shifts, np.concatenate((slots, unused)), places, output_rows]
        values += [row for of_size in tiles for row in of_size]
        each.inputs.copy_(on_device(pack(values, each.lengths), each.inputs.device))
        each.graph.replay()
        rows = each.step.output_rows[: len(output_rows)]
        return each.output[: len(ids)], replace(each.step, output_rows=rows)

    def _record(self, size: int, pool: Any) -> _PromptGraph:
        room = tile_room(size, self._cache.shape.slots, self._tile_sizes)
        lengths = [size] * 5 + [count for count in room for _ in range(_TILE_FIELDS)]
        device = self._model.device
        inputs = torch.zeros(part_starts(lengths)[-1], dtype=torch.int32, device=device)
        ids, shifts, slots, places, rows, *tiled = split(inputs, lengths)
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
        return _PromptGraph(graph, lengths, inputs, step, output)
