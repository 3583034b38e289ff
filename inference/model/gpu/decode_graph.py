"""Decode steps as CUDA graphs: a step of one token per sequence is one launch instead of hundreds.

A graph serves up to B sequences; a few sizes of B are recorded before the first request. Unused
rows compute on a scratch slot, and their results are discarded. Without a pipeline the graph also
chooses the best token of each sequence, which the next graph reads; if a step has sampled rows, a
kernel for them follows the graph.
"""

# Shapes: B sequences of a graph, R numbers of a sequence, E hidden, V vocabulary

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inference.model.gpu.attention_layout import single_tokens
from inference.model.gpu.recording import SizedGraphs, record_graph
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.stage import GeneratorModel
from inference.model.step import Step
from inference.model.token_feed import TokenFeed
from inference.parallel.layout import ParallelLayout

_STEP = 8  # between the sizes of graphs


@dataclass(frozen=True)
class DecodeGraph:
    """One graph, its inputs, and its outputs, which every replay overwrites."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor  # (R, B) int64
    hidden: torch.Tensor | None  # (B, E), from the previous stage
    output: torch.Tensor  # (B, E) or (B, V)
    chosen: torch.Tensor | None  # (B, 2) int32
    idle: tuple[int, ...]

    def fill(self, numbers: Array) -> None:
        """Set the numbers of the sequences, (R, sequences), and idle numbers for the other rows."""
        every = np.empty(self.numbers.shape, np.int64)
        every[:] = np.array(self.idle)[:, None]
        every[:, : numbers.shape[1]] = numbers
        self.numbers.copy_(on_device(every, self.numbers.device))


class DecodeGraphs(SizedGraphs):
    """The graphs of one rank's stage; they contain the all-reduces over the stage's ranks.

    The numbers of a sequence are its token, its slot, the token's index in the slot, the token's
    position, and an id that must not be chosen. With an encoder there are three more before the
    last: the slot of the encoder's output, the index of its last token, and the IA3 task.
    """

    def __init__(
        self,
        model: GeneratorModel,
        cache: KVCache,
        feed: TokenFeed,
        layout: ParallelLayout,
        *,
        idle: Sequence[int] = (),
    ) -> None:
        """Prepare; `record` records the graphs.

        `idle` are the three encoder numbers of a row without a sequence.
        """
        slots = cache.shape.slots
        small = [size for size in (1, 2, 4) if size < slots]
        super().__init__([*small, *range(_STEP, slots, _STEP), slots], "decoding steps")
        self._model, self._cache, self._feed, self._layout = model, cache, feed, layout
        self._idle = (0, cache.scratch_slot, 0, 0, *idle, -1)
        # Shared by all graphs, of which one runs at a time: separate logits of 66 graphs would take
        # 10 GB for a vocabulary of 150,000 tokens.
        width = 0 if model.head is None else model.head.width
        self._logits = torch.empty(slots, width, device=cache.device)

    def record(self) -> None:
        """Record every size, at the same time on all ranks of a stage."""
        super().record()
        largest = self._graphs[self._sizes[-1]]
        if largest.chosen is not None:  # also compile the kernels for sampled rows
            numbers = largest.numbers
            draws = torch.ones(self._sizes[-1], 6, device=numbers.device)
            for penalties in (None, torch.ones(self._sizes[-1], 3, device=numbers.device)):
                self._feed.choose(largest.output, numbers[1], numbers[-1], draws, penalties)

    def _record(self, size: int, pool: Any) -> DecodeGraph:
        model, device = self._model, self._model.device
        numbers = torch.tensor([[number] * size for number in self._idle], device=device)
        hidden = None if self._layout.is_first_stage else model.empty_hidden(size).zero_()
        graph, (output, chosen) = record_graph(lambda: self._run(numbers, hidden), device, pool)
        return DecodeGraph(graph, numbers, hidden, output, chosen, self._idle)

    def _run(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stage's output (B, E), on the last stage the logits (B, V) fp32.

        Without a pipeline the result of `TokenFeed.choose`, (B, 2), is returned, too.

        Args:
            numbers: Numbers of each sequence (R, B) int64.
            hidden: Output of the previous stage (B, E), None on the first.
        """
        ids, slots, places, positions, *encoder, forbidden = numbers.unbind(0)
        model, layout = self._model, self._layout
        attention = single_tokens(slots, places, self._cache, rules=model.rules)
        encoded = tasks = None
        if encoder:
            read, last, tasks = encoder
            # Each token takes the place of the encoder's last token, which sees all of them.
            encoded = single_tokens(read, last, self._cache, rules=model.rules.across)
        step = Step(
            ids=self._feed.ids(ids, slots),
            positions=positions,
            output_rows=attention.tiles[0][1].rows,
            attention=attention,
            encoded=encoded,
            tasks=tasks,
        )
        x = model.embed(step) if hidden is None else hidden
        x = model.run_layers(x, step)
        if not layout.is_last_stage:
            return x, None
        logits = model.logits(x, step, out=self._logits[: len(x)])
        if layout.pp_size > 1:
            return logits, None
        return logits, self._feed.choose(logits, slots, forbidden)
