"""Base class of ranks: place, device, weights, and communication with the other ranks."""

# Shapes: n tokens whose logits are wanted, V vocabulary, N tokens of a step, E hidden

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch.distributed.distributed_c10d import Store

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderDecoderArchitecture,
)
from export_scripts.ft.reader import FTReader
from inference.model.kv_cache import CacheShape, KVCache, on_device
from inference.model.token_feed import Chosen, TokenFeed, chosen_to_host
from inference.model.weights import RankWeights
from inference.parallel.epilogue import ordered_sum
from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout
from inference.parallel.linear import AllReduce
from inference.ranks.device import compute_dtype, matrix_dtype, rank_device
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

StepT = TypeVar("StepT")

if TYPE_CHECKING:
    from inference.model.gpu.decode_graph import DecodeGraph

MOST_PROMPT_TOKENS = 8192  # of a step on a GPU; fewer would leave it idle


@dataclass(frozen=True)
class StepResult:
    """The result of a step, on rank 0.

    An encoder alone gives `hidden`, all rows' tokens one after the other, and, where wanted,
    `attentions` (rows, layers, heads, S, S), zero beyond each row's length. `chosen` are the tokens
    of a plan with choices. `done` is the event after the last kernel, None on CPU.
    """

    logits: torch.Tensor  # (n, V or more) fp32
    pooled: torch.Tensor | None = None  # (segments, E) fp32
    hidden: torch.Tensor | None = None  # (N, E)
    attentions: torch.Tensor | None = None
    chosen: Chosen | None = None
    done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return once all of it is computed."""
        if self.done is not None:
            self.done.synchronize()


def rank_weights(
    reader: FTReader, layout: ParallelLayout, *, data_type: str, device: torch.device
) -> RankWeights:
    """Return a rank's view of a folder, in the types that implement `data_type` on the device.

    Raises:
        CheckpointMismatchError: The folder was split for another number of ranks.
    """
    return RankWeights(
        reader,
        layout,
        dtype=compute_dtype(data_type, device),
        device=device,
        matrix_dtype=matrix_dtype(data_type, reader.weight_data_type, device),
    )


def cache_shape(
    architecture: DecoderArchitecture | EncoderDecoderArchitecture,
    layout: ParallelLayout,
    *,
    slots: int,
    max_len: int,
    block_tokens: int = 0,
    blocks: int = 0,
) -> CacheShape:
    """Return the cache of one rank, with an encoder also that of its output."""
    if isinstance(architecture, DecoderArchitecture):
        layers, heads, parts = architecture.num_layer, architecture.kv_head_num, 1
        size_per_head = architecture.size_per_head
    else:
        stack = architecture.decoder
        assert stack is not None, "an encoder alone has no cache"
        layers, heads, parts = stack.num_layer, stack.head_num, 2
        size_per_head = stack.size_per_head
    return CacheShape(
        num_layer=len(layout.layers(layers)),
        slots=slots,
        kv_head_num=heads // layout.tp_size,
        max_len=max_len,
        size_per_head=size_per_head,
        block_tokens=block_tokens,
        blocks=blocks,
        parts=parts,
    )


class RankBase(ABC):
    """One rank of a model; rank 0 sends the steps to the others."""

    architecture: Architecture
    cache: KVCache  # of ranks that generate, as `_feed`
    _feed: TokenFeed

    def __init__(self, settings: RankSettings) -> None:
        """Take a place and a device; subclasses load."""
        self.layout = settings.layout
        self.device = rank_device(settings)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            # cuDNN plans its attention again for every shape, and nearly every step has a new one:
            # 256 mixed requests took 223 s on an H200 with cuDNN, 17 s without.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._groups: RankGroups | None = None
        self._in_rank_order = settings.batch_invariant

    def open_weights(self, settings: RankSettings) -> tuple[RankWeights, Architecture]:
        """Return this rank's view of the folder, and the model's architecture.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
        """
        reader = FTReader(Path(settings.ft_dir))
        weights = rank_weights(
            reader, self.layout, data_type=settings.data_type, device=self.device
        )
        return weights, reader.family.architecture(reader.config)

    @property
    def groups(self) -> RankGroups:
        """The connection to the other ranks."""
        assert self._groups is not None, "ranks are not connected"
        return self._groups

    @property
    def all_reduce(self) -> AllReduce | None:
        """The sum over the ranks of this stage, None for a single one."""
        return self._reduce if self.layout.tp_size > 1 else None

    def connect(self, store: Store, settings: RankSettings) -> RankGroups:
        """Join the other ranks, all of which do so at the same time."""
        self._groups = RankGroups(
            self.layout,
            store,
            device=self.device,
            timeout_s=settings.rank_timeout_s,
            shared_memory=settings.shared_memory,
        )
        return self._groups

    def ping(self) -> None:
        """Return once every rank has answered."""
        if self._groups is not None:
            self._groups.meet()

    def close(self) -> None:
        """Close the connection to the other ranks, all of which do the same."""
        if self._groups is not None:
            self._groups.close()

    def run(self, plan: StepPlan, embeddings: torch.Tensor | None = None) -> StepResult | None:
        """Run one step; rank 0 gets the result.

        `embeddings` (plan.embedding_rows, E) fp32 are given on rank 0; the others receive them.
        """
        with torch.inference_mode():
            embeddings = self._share(embeddings, plan.embedding_rows, self.architecture.hidden)
            if plan.moves or plan.entries:
                self.cache.update(plan.moves, plan.entries)
            return self._run(plan, embeddings)

    @abstractmethod
    def _run(self, plan: StepPlan, embeddings: torch.Tensor | None) -> StepResult | None:
        """Run a step whose embeddings every rank has, and whose cache moves are done."""

    def prepare(self) -> None:  # noqa: B027 - most ranks have nothing to prepare
        """Do the work that would slow down the first requests; all ranks do so at the same time."""

    def _new_cache(
        self,
        architecture: DecoderArchitecture | EncoderDecoderArchitecture,
        settings: RankSettings,
        dtype: torch.dtype,
        prefixes: Sequence[torch.Tensor] = (),
    ) -> KVCache:
        shape = cache_shape(
            architecture,
            self.layout,
            slots=settings.slots,
            max_len=settings.max_len,
            block_tokens=settings.block_tokens,
            blocks=settings.blocks,
        )
        return KVCache(shape, dtype=dtype, device=self.device, prefixes=prefixes)

    def _token_feed(self, slots: int, vocab_size: int) -> TokenFeed:
        layout = self.layout
        gather = self._gather_stage if layout.tp_size > 1 else None
        vocab = layout.vocab_rows(vocab_size)
        return TokenFeed(slots, self.device, vocab=vocab, vocab_size=vocab_size, gather=gather)

    def _run_stage(
        self,
        micro_batches: Sequence[StepT],
        *,
        embed: Callable[[StepT], torch.Tensor],
        empty_hidden: Callable[[StepT], torch.Tensor],
        run_layers: Callable[[torch.Tensor, StepT], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the last layer's output of each micro-batch on the last stage, elsewhere nothing.

        While a stage works on one micro-batch, the next stage works on the one before.

        Args:
            micro_batches: Steps of the model.
            embed: Returns the input of the model's first layer (N, E).
            empty_hidden: Returns an uninitialised (N, E) for the input of this stage's first layer.
            run_layers: Returns the output of this stage's last layer (N, E).
        """
        outputs, sends = [], []
        for step in micro_batches:
            if self.layout.is_first_stage:
                x = embed(step)
            else:
                x = self.groups.receive(empty_hidden(step), self.layout.previous_rank)
            x = run_layers(x, step)
            if self.layout.is_last_stage:
                outputs.append(x)
            else:
                sends.append(self.groups.send(x, self.layout.next_rank))
        for sent in sends:
            sent.wait()
        return outputs

    def _run_graph(self, graph: DecodeGraph, plan: StepPlan, vocab_size: int) -> StepResult | None:
        """Run a graph between the stages before and after; return its result on rank 0."""
        if graph.hidden is not None:
            self.groups.receive(graph.hidden, self.layout.previous_rank)
        graph.run()
        if not self.layout.is_last_stage:
            self.groups.send(graph.output, self.layout.next_rank).wait()
            return self._result(None, plan, vocab_size=vocab_size)
        count = len(plan.segments)
        part, chosen = graph.output[:count], None
        if plan.choices is not None:
            assert graph.chosen is not None
            chosen, numbers = graph.chosen[:count], graph.numbers[:, :count]
            if plan.draws is not None:
                chosen = self._choose(part, numbers[1], numbers[-1], plan)
        return self._result(part, plan, vocab_size=vocab_size, chosen=chosen)

    def _result(
        self,
        part: torch.Tensor | None,
        plan: StepPlan,
        *,
        vocab_size: int,
        pooled: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
    ) -> StepResult | None:
        """Return on rank 0 the tokens that a plan lets the ranks choose, or all logits, or both.

        `part` is this rank's slice of the logits, (n, V / T or more), None without; `chosen` are
        the tokens where they are known already.
        """
        count = len(plan.output_rows)
        if plan.choices is not None and count and chosen is None:
            assert part is not None, "stages of a pipeline choose no tokens"
            slots, forbidden = on_device(np.array(plan.choices, np.int64).T.copy(), self.device)
            slots = torch.where(slots < 0, self._feed.unread, slots)
            chosen = self._choose(part, slots, forbidden, plan)
        logits = None
        if count and (chosen is None or plan.with_logits):
            logits = self._first_rank_logits(part, count, vocab_size)
        if self.layout.rank != 0:
            return None
        return StepResult(
            torch.empty(0, vocab_size) if logits is None else logits,
            pooled,
            chosen=None if chosen is None else chosen_to_host(chosen),
            done=self._done(),
        )

    def _choose(
        self,
        part: torch.Tensor,
        slots: torch.Tensor,
        forbidden: torch.Tensor,
        plan: StepPlan,
    ) -> torch.Tensor:
        for slot, (seen, ids, bias) in plan.marks:
            self._feed.mark(
                slot,
                np.asarray(seen, np.int64),
                np.asarray(ids, np.int64),
                np.asarray(bias, np.float32),
            )
        draws, penalties = (
            None if numbers is None else on_device(np.array(numbers, np.float32), self.device)
            for numbers in (plan.draws, plan.penalties)
        )
        return self._feed.choose(part, slots, forbidden, draws, penalties)

    def _done(self) -> torch.cuda.Event | None:
        """Return an event that is set when all work so far is done."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _reduce(
        self,
        x: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._in_rank_order:
            return ordered_sum(self.groups.gather_stage(x), bias=bias, residual=residual)
        return self.groups.all_reduce(x, bias=bias, residual=residual)

    def _gather_stage(self, x: torch.Tensor) -> torch.Tensor:
        return self.groups.gather_stage(x)

    def _share(self, rows: torch.Tensor | None, count: int, width: int) -> torch.Tensor | None:
        """Return on every rank the (count, width) fp32 rows that rank 0 holds, None for no rows."""
        if not count:
            return None
        if rows is None:
            rows = torch.empty(count, width)
        if self._groups is not None:
            rows = self._groups.share(rows)
        return rows.to(self.device)

    def _first_rank_logits(
        self, part: torch.Tensor | None, count: int, vocab_size: int
    ) -> torch.Tensor | None:
        """Return on rank 0 the logits (count, V or more), gathered from the last stage's slices."""
        if self._groups is None:
            return part
        shape = (count, self.layout.vocab_rows_per_rank(vocab_size))
        gathered = self._groups.gather(part, shape, ranks=self.layout.last_stage_ranks)
        return torch.cat(gathered, dim=1) if gathered else None

    def _first_rank_copy(
        self, output: torch.Tensor | None, room: torch.Tensor
    ) -> torch.Tensor | None:
        """Return on rank 0 the last stage's output; `room`, of its shape and type, receives it."""
        if self.layout.pp_size == 1:
            return output if self.layout.rank == 0 else None
        source = self.layout.last_stage_ranks[0]
        if self.layout.rank == source:
            assert output is not None
            self.groups.send(output, 0).wait()
        return self.groups.receive(room, source) if self.layout.rank == 0 else None
