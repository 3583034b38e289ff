"""Passes of an encoder as CUDA graphs: one launch for rows of any lengths.

A graph serves rows of up to N tokens in total; unused attention tiles return at once. Import this
module only where Triton is installed.
"""

# Shapes: N tokens of a graph, T tiles of attention, E hidden

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inference.model.gpu.recording import SizedGraphs, record_graph, token_graph_sizes
from inference.model.gpu.rows import TILE_NUMBERS
from inference.model.ragged import RaggedRows

_TOKENS_OF_A_TILE = 16  # least average for which a graph has enough tiles
_MORE_TILES = 16


@dataclass(frozen=True)
class _EncoderGraph:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor  # (N, ...)
    rows: RaggedRows
    output: torch.Tensor  # (N, E)


class EncoderGraphs(SizedGraphs):
    """The graphs of a rank with all layers of an encoder."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, RaggedRows], torch.Tensor],
        empty_inputs: Callable[[int], torch.Tensor],
        *,
        parameters: int,
        device: torch.device,
    ) -> None:
        """Prepare; `record` records the graphs.

        Args:
            forward: Returns the encoder's output (N, E) for its inputs (N, ...) and their rows.
            empty_inputs: Returns an uninitialised buffer for the inputs of N tokens.
            parameters: Number of parameters of this rank's layers.
            device: The encoder's device.
        """
        self._forward, self._empty_inputs, self._device = forward, empty_inputs, device
        super().__init__(token_graph_sizes(parameters), "the encoder")

    def run(self, inputs: torch.Tensor, rows: RaggedRows) -> torch.Tensor | None:
        """Return the output (tokens, E), or None if no graph can serve the rows."""
        tokens = len(inputs)
        each = self.holding(tokens)
        if each is None:
            return None
        assert rows.tiles is not None
        room, tiles = each.rows.tiles, rows.tiles.shape[1]
        if tiles > room.shape[1]:
            return None
        each.inputs[:tokens].copy_(inputs)
        each.rows.positions[:tokens].copy_(rows.positions)
        room.zero_()
        room[:, :tiles].copy_(rows.tiles)
        each.graph.replay()
        output: torch.Tensor = each.output[:tokens]
        return output.clone()  # the next pass overwrites it

    def _record(self, size: int, pool: Any) -> _EncoderGraph:
        device = self._device
        positions = torch.zeros(size, dtype=torch.int64, device=device)
        count = size // _TOKENS_OF_A_TILE + _MORE_TILES
        tiles = torch.zeros(TILE_NUMBERS, count, dtype=torch.int32, device=device)
        rows = RaggedRows((), positions, tiles)
        inputs = self._empty_inputs(size).zero_()
        graph, output = record_graph(lambda: self._forward(inputs, rows), device, pool)
        return _EncoderGraph(graph, inputs, rows, output)
