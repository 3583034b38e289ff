"""Decoding steps as CUDA graphs: a step of one token per sequence is one launch, not hundreds.

A graph serves up to B sequences; B comes in few sizes, all of which are recorded before the first
request. Unused places of a step compute on a scratch slot, whose results are discarded. Without a
pipeline the graph also chooses the best token of each sequence, which the next graph reads; in a
step with sampled rows the kernel of these follows the graph.
"""

# Shapes: B sequences of a graph, R numbers of a sequence, E hidden, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from inference.model.cached_attention import EncodedSlots
from inference.model.decoder import Decoder
from inference.model.encoder_decoder import DecoderStep, EncoderDecoder
from inference.model.gpu.attention_layout import single_tokens
from inference.model.gpu.recording import record_graph, record_sizes
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.step import Step
from inference.model.token_feed import TokenFeed
from inference.parallel.layout import ParallelLayout
from inference.parallel.linear import VocabParallelHead

_STEP = 8  # between the sizes of graphs


class GraphModel(Protocol):
    """The part of a model that graphs record: one stage, with one new token of each sequence.

    `idle` are the numbers of a place without a sequence, such as the scratch slot.
    """

    layout: ParallelLayout
    device: torch.device
    feed: TokenFeed
    idle: tuple[int, ...]

    def empty_hidden(self, sequences: int) -> torch.Tensor:
        """Return an uninitialised (sequences, E) for hidden states."""
        ...

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stage's output (B, E), of the last one its logits (B, V) fp32.

        A model of a single stage also returns the tokens it has chosen, (B, 2) as in `Chosen`.

        Args:
            numbers: Of each sequence (R, B) int64.
            hidden: Output of the stage before (B, E), None on the first.
        """
        ...


@dataclass(frozen=True)
class DecodeGraph:
    """One graph, its inputs and its outputs."""

    graph: torch.cuda.CUDAGraph
    numbers: torch.Tensor  # (R, B) int64
    hidden: torch.Tensor | None  # (B, E), from the stage before
    output: torch.Tensor  # (B, E) or (B, V)
    chosen: torch.Tensor | None  # (B, 2) int32
    idle: tuple[int, ...]

    def fill(self, numbers: Array) -> None:
        """Set the numbers of the first sequences, (R, sequences)."""
        every = np.empty(self.numbers.shape, np.int64)
        every[:] = np.array(self.idle)[:, None]
        every[:, : numbers.shape[1]] = numbers
        self.numbers.copy_(on_device(every, self.numbers.device))

    def run(self) -> None:
        """Run the step; `output` and `chosen` are overwritten."""
        self.graph.replay()


class DecodeGraphs:
    """The graphs of one rank's stage; the sums over the ranks of the stage are part of them."""

    def __init__(self, model: GraphModel, *, sequences: int) -> None:
        """Record nothing yet; no step has more than `sequences` sequences."""
        self._model = model
        self._sizes = graph_sizes(sequences)
        self._graphs: dict[int, DecodeGraph] = {}

    def record(self) -> None:
        """Record every size; the ranks of a stage do so at the same time."""
        self._graphs = record_sizes(self._sizes, self._record, "decoding steps")
        largest = self._graphs[self._sizes[-1]]
        if largest.chosen is not None:  # the kernels of sampled rows are compiled now, too
            numbers = largest.numbers
            draws = torch.ones(self._sizes[-1], 6, device=numbers.device)
            for penalties in (None, torch.ones(self._sizes[-1], 2, device=numbers.device)):
                self._model.feed.choose(largest.output, numbers[1], numbers[-1], draws, penalties)

    def graph(self, sequences: int) -> DecodeGraph:
        """Return the smallest graph that holds a number of sequences."""
        return self._graphs[next(size for size in self._sizes if size >= sequences)]

    def _record(self, size: int, pool: Any) -> DecodeGraph:
        model, layout, device = self._model, self._model.layout, self._model.device
        numbers = torch.tensor([[number] * size for number in model.idle], device=device)
        hidden = None if layout.is_first_stage else model.empty_hidden(size).zero_()
        graph, (output, chosen) = record_graph(lambda: model.forward(numbers, hidden), device, pool)
        return DecodeGraph(graph, numbers, hidden, output, chosen, model.idle)


def graph_sizes(sequences: int) -> list[int]:
    """Return the sizes of graphs for up to `sequences` sequences, ascending."""
    small = [size for size in (1, 2, 4) if size < sequences]
    return [*small, *range(_STEP, sequences, _STEP), sequences]


def _logits_room(head: VocabParallelHead | None, cache: KVCache) -> torch.Tensor:
    """Return memory for the logits of every graph, of which one runs at a time.

    The logits of 66 graphs and a vocabulary of 150,000 tokens would take 10 GB.
    """
    width = 0 if head is None else head.width
    return torch.empty(cache.shape.slots, width, device=cache.device)


class DecoderGraphModel:
    """A decoder-only model's stage.

    The numbers of a sequence: its token, its slot, the token's place among what the slot has
    cached, the token's position, and an id that may not be chosen.
    """

    def __init__(
        self, model: Decoder, cache: KVCache, feed: TokenFeed, layout: ParallelLayout
    ) -> None:
        self.layout, self.device = layout, model.device
        self.idle: tuple[int, ...] = (0, cache.scratch_slot, 0, 0, -1)
        self._model = model
        self._cache = cache
        self.feed = feed
        heads = model.architecture.head_num // layout.tp_size
        self._group = heads // cache.shape.kv_head_num

        self._logits = _logits_room(None if model.head is None else model.head.slice, cache)

    def empty_hidden(self, sequences: int) -> torch.Tensor:
        """Return an uninitialised (sequences, E) for hidden states."""
        hidden = self._model.architecture.hidden
        return torch.empty(sequences, hidden, dtype=self._model.dtype, device=self.device)

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stage's output, see `GraphModel`."""
        ids, slots, places, positions, forbidden = numbers.unbind(0)
        model = self._model
        paged = single_tokens(slots, places, rules=model.rules, group=self._group)
        step = Step(
            ids=self.feed.ids(ids, slots),
            positions=positions,
            cache=self._cache,
            output_rows=paged.tiles[0].rows,
            paged=paged,
        )
        x = model.embed(step) if hidden is None else hidden
        x = model.run_layers(x, step)
        if not self.layout.is_last_stage:
            return x, None
        logits = model.logits(x, step, out=self._logits[: len(x)])
        if self.layout.pp_size > 1:
            return logits, None
        return logits, self.feed.choose(logits, slots, forbidden)


class EncoderDecoderGraphModel:
    """A T5 decoder's stage.

    The numbers of a sequence: its token, its slot, the token's place, the slot of the encoder's
    output that it reads, the last place of this, its IA3 task, and an id that may not be chosen.
    """

    def __init__(
        self, model: EncoderDecoder, cache: KVCache, feed: TokenFeed, layout: ParallelLayout
    ) -> None:
        self.layout, self.device = layout, model.device
        nowhere, self._no_task = cache.scratch_slot, model.architecture.ia3_num_tasks
        self.idle: tuple[int, ...] = (0, nowhere, 0, nowhere, 0, self._no_task, -1)
        self._model = model
        self._cache = cache
        self.feed = feed
        self._logits = _logits_room(model.head, cache)

    def empty_hidden(self, sequences: int) -> torch.Tensor:
        """Return an uninitialised (sequences, E) for hidden states."""
        return self._model.empty_hidden(sequences)

    def forward(
        self, numbers: torch.Tensor, hidden: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stage's output, see `GraphModel`."""
        ids, slots, places, encoded, last, tasks, forbidden = numbers.unbind(0)
        model = self._model
        paged = single_tokens(slots, places, rules=model.rules, group=1)
        step = Step(
            ids=self.feed.ids(ids, slots),
            positions=places,
            cache=self._cache,
            output_rows=paged.tiles[0].rows,
            paged=paged,
        )
        # As if each token were the last of the encoder's: it sees all of them.
        cross = single_tokens(encoded, last, rules=model.rules.across, group=1)
        inputs = DecoderStep(step, EncodedSlots(paged=cross), tasks if self._no_task else None)
        x = model.embed_step(inputs) if hidden is None else hidden
        x = model.run_decoder(x, inputs)
        if not self.layout.is_last_stage:
            return x, None
        logits = model.logits(x, out=self._logits[: len(x)])
        if self.layout.pp_size > 1:
            return logits, None
        return logits, self.feed.choose(logits, slots, forbidden)
