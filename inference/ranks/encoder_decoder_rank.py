"""One rank of an encoder-decoder, or of its encoder alone.

A step first encodes new rows, whose keys and values every stage caches in slots of their own, and
then runs the decoder over the new tokens of each sequence.
"""

# Shapes: N tokens of an encoder pass, n tokens whose logits are wanted, V vocabulary, E hidden,
#         H heads

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.cached_attention import EncodedSlots
from inference.model.encoder_decoder import (
    DecoderStep,
    EncodedRow,
    EncoderBatch,
    EncoderDecoder,
    make_decoder_step,
)
from inference.model.kv_cache import encoder_slot, on_device
from inference.model.ragged import ragged_rows
from inference.model.step import Segment, Step
from inference.model.token_feed import NEWEST
from inference.ranks.base import RankBase, StepResult
from inference.ranks.device import gemm_options, has_row_kernels, layer_parameters, on_gpu
from inference.ranks.encoder_pass import EncoderPass
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.settings import RankSettings

if TYPE_CHECKING:
    from inference.model.gpu.attention import PagedAttention
    from inference.model.gpu.decode_graph import DecodeGraphs
    from inference.model.gpu.encoder_graph import EncoderGraphs

# Tokens of a step for which libraries choose and load their kernels before the first request.
_WARM_UP_TOKENS = (1, 16, 64, 256, 1024)


class EncoderDecoderRank(RankBase):
    """A rank that holds a part of an encoder-decoder and its cache, or of an encoder alone."""

    architecture: EncoderDecoderArchitecture

    def __init__(self, settings: RankSettings) -> None:
        """Load this rank's part of the model.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
            ValueError: The model does not divide among the ranks.
        """
        super().__init__(settings)
        weights, architecture = self.open_weights(settings)
        assert isinstance(architecture, EncoderDecoderArchitecture)
        if settings.encoder_only:
            architecture = replace(architecture, decoder=None)
        self.architecture = architecture
        gemm = gemm_options(settings)
        self.model = EncoderDecoder(weights, architecture, reduce=self.all_reduce, gemm=gemm)
        self._no_task = architecture.ia3_num_tasks  # names a row of ones in every table
        if architecture.decoder is not None:
            self.cache = self._new_cache(architecture, settings, weights.dtype)
            self._feed = self._token_feed(settings.slots, architecture.vocab_size)
            nothing = EncodedRow(self.cache.scratch_slot, 1, self._no_task)
            self._encoded = [nothing] * (settings.slots + 1)  # what each slot reads
        self._graphs: DecodeGraphs | None = None
        self._encoder_graphs: EncoderGraphs | None = None
        self._tiled = has_row_kernels(self.device, weights.dtype)
        self._pass: EncoderPass | None = None
        self._rows: tuple[EncoderRow, ...] = ()  # of `_pass`

    def prepare(self) -> None:
        """Record the graphs of encoder and decoder, and run steps that are not graphs once."""
        if not on_gpu(self.device):
            return
        with torch.inference_mode():
            if self._tiled and self.layout.pp_size == 1:
                self._record_encoder()
            if self.architecture.decoder is not None:
                self._record_decoder()

    def _record_encoder(self) -> None:
        from inference.model.gpu.encoder_graph import EncoderGraphs

        stack = self.architecture.encoder
        heads = (stack.head_num, stack.head_num, stack.size_per_head)
        hidden, gated = self.architecture.hidden, self.architecture.gated
        layer = layer_parameters(hidden, heads, stack.inter_size, gated=gated)
        self._encoder_graphs = EncoderGraphs(
            self.model.encode,
            lambda tokens: torch.zeros(tokens, dtype=torch.int64, device=self.device),
            parameters=stack.num_layer * layer // self.layout.tp_size,
            device=self.device,
        )
        self._encoder_graphs.record()

    def _record_decoder(self) -> None:
        from inference.model.gpu.decode_graph import DecodeGraphs, EncoderDecoderGraphModel

        for tokens in _WARM_UP_TOKENS:
            self._run_nothing(tokens)
        model = EncoderDecoderGraphModel(self.model, self.cache, self._feed, self.layout)
        self._graphs = DecodeGraphs(model, sequences=self.cache.shape.slots)
        self._graphs.record()

    def _run_nothing(self, tokens: int) -> None:
        """Run tokens of one sequence and one token of another; discard their results."""
        slot = self.cache.scratch_slot
        segments = [Segment(slot, 0, min(tokens, self.cache.shape.max_len)), Segment(slot, 0, 1)]
        ids = torch.zeros(sum(segment.count for segment in segments), dtype=torch.int64)
        step = self._decoder_step(ids, segments, torch.tensor([0]))
        first = self.layout.is_first_stage
        x = self.model.embed_step(step) if first else self.model.empty_hidden(len(ids)).zero_()
        x = self.model.run_decoder(x, step)
        if self.layout.is_last_stage:
            self.model.logits(x[:1])

    def _run(self, plan: StepPlan, embeddings: torch.Tensor | None) -> StepResult | None:
        if plan.encoder_rows:
            self._begin(plan, embeddings)
        if plan.encoder_rows or plan.encoder_layers:
            self._encode(plan.encoder_layers or self.architecture.encoder.num_layer)
        if self.architecture.decoder is None:
            return self._encoder_result()
        if self._graphs is not None and _is_decoding(plan):
            return self._run_recorded(self._graphs, plan)
        part = self._decode(plan) if plan.segments else None
        return self._result(part, plan, vocab_size=self.architecture.vocab_size)

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._graphs = self._encoder_graphs = None  # they contain sums over the connection
        super().close()

    def _begin(self, plan: StepPlan, embeddings: torch.Tensor | None) -> None:
        """Start a pass of new rows; it replaces one whose requests were cancelled."""
        counts = [row.count for row in plan.encoder_rows]
        rows = ragged_rows(counts, self.device, tiled=self._tiled)
        tasks = [self._task_of(row) for row in plan.encoder_rows]
        batch = EncoderBatch(
            on_device(np.array(plan.encoder_ids, np.int64), self.device),
            rows,
            tasks=rows.per_token(tasks) if any(t != self._no_task for t in tasks) else None,
            has_virtual=plan.has_virtual,
            embeddings=embeddings,
        )
        self._rows = plan.encoder_rows
        self._pass = EncoderPass(
            self.model,
            batch,
            layout=self.layout,
            groups=self._groups,
            graphs=self._encoder_graphs,
            with_attentions=plan.attentions,
        )

    def _encode(self, layers: int) -> None:
        """Continue the pass; at its end every stage caches what its decoder layers read."""
        assert self._pass is not None, "no pass was begun"
        self._pass.advance(layers)
        if not self._pass.is_done or self.architecture.decoder is None:
            return
        batch = self._pass.batch
        output = self._spread(self._pass.output, batch)
        slots = self.cache.shape.slots
        targets = [encoder_slot(row.slots, slots) for row in self._rows]
        self.model.cache_encoded(output, batch, targets, self.cache)
        for row, target in zip(self._rows, targets, strict=True):
            encoded = EncodedRow(target, row.count, self._task_of(row))
            for slot in row.slots:
                self._encoded[slot] = encoded
        self._pass = None

    def _task_of(self, row: EncoderRow) -> int:
        return self._no_task if row.task is None else row.task

    def _spread(self, output: torch.Tensor | None, batch: EncoderBatch) -> torch.Tensor:
        """Send the last stage's encoder output (N, E) to every stage."""
        layout = self.layout
        if layout.pp_size == 1:
            assert output is not None
            return output
        if output is None:
            source = layout.last_stage_ranks[layout.tp_rank]
            return self.groups.receive(self.model.empty_hidden(len(batch.ids)), source)
        sends = [
            self.groups.send(output, stage * layout.tp_size + layout.tp_rank)
            for stage in range(layout.pp_size - 1)
        ]
        for sent in sends:
            sent.wait()
        return output

    def _run_recorded(self, graphs: DecodeGraphs, plan: StepPlan) -> StepResult | None:
        encoded = [self._encoded[segment.slot] for segment in plan.segments]
        graph = graphs.graph(len(encoded))
        numbers = np.empty((7, len(encoded)), np.int64)
        numbers[0] = plan.ids
        numbers[1] = [segment.slot for segment in plan.segments]
        numbers[2] = [segment.start for segment in plan.segments]
        numbers[3] = [each.slot for each in encoded]
        numbers[4] = [each.length - 1 for each in encoded]
        numbers[5] = [each.task for each in encoded]
        numbers[6] = -1 if plan.choices is None else [banned for _, banned in plan.choices]
        graph.fill(numbers)
        return self._run_graph(graph, plan, self.architecture.vocab_size)

    def _decode(self, plan: StepPlan) -> torch.Tensor | None:
        """Return this rank's slice of the logits of the decoder's step, (n, V / T or more)."""
        ids, outputs = (
            torch.tensor(each, dtype=torch.int64) for each in (plan.ids, plan.output_rows)
        )
        inputs = self._decoder_step(ids, plan.segments, outputs)
        hidden = self._run_stage(
            [inputs],
            embed=self.model.embed_step,
            empty_hidden=lambda inputs: self.model.empty_hidden(len(inputs.step.ids)),
            run_layers=self.model.run_decoder,
        )
        if not hidden or not len(plan.output_rows):
            return None
        return self.model.logits(hidden[0].index_select(0, inputs.step.output_rows))

    def _decoder_step(
        self, ids: torch.Tensor, segments: Sequence[Segment], output_rows: torch.Tensor
    ) -> DecoderStep:
        """Lay out a step of the decoder; `ids` and `output_rows` are on the CPU."""
        counts = [segment.count for segment in segments]
        encoded = [self._encoded[segment.slot] for segment in segments]
        tasks = None
        if self.architecture.ia3_num_tasks:
            tasks = on_device(np.repeat([each.task for each in encoded], counts), self.device)
        if on_gpu(self.device):
            step, cross = self._paged_step(ids, segments, output_rows)
            return DecoderStep(step, EncodedSlots(paged=cross), tasks)
        if NEWEST in ids.numpy():
            slots = np.repeat([segment.slot for segment in segments], counts)
            ids = self._feed.ids(ids.to(self.device), on_device(slots, self.device))
        return make_decoder_step(
            ids.to(self.device),
            segments,
            encoded,
            output_rows.to(self.device),
            cache=self.cache,
            rules=self.model.rules,
            dtype=self.model.dtype,
            tasks=tasks,
        )

    def _paged_step(
        self, ids: torch.Tensor, segments: Sequence[Segment], output_rows: torch.Tensor
    ) -> tuple[Step, PagedAttention]:
        """Lay out a step for the GPU's kernels, with the attention over the encoder's output."""
        from inference.model.gpu.attention_layout import paged_attention
        from inference.model.gpu.paged_step import make_paged_step

        step = make_paged_step(
            ids.numpy(),
            segments,
            output_rows.numpy(),
            cache=self.cache,
            rules=self.model.rules,
            group=1,
            feed=self._feed,
        )
        encoded = [(self._encoded[segment.slot], segment.count) for segment in segments]
        # As if each token were the last of the encoder's: it sees all of them.
        reading = [(each.slot, each.length - 1, 1) for each, count in encoded for _ in range(count)]
        rules = self.model.rules.across
        return step, paged_attention(np.array(reading), rules=rules, group=1, device=self.device)

    def _encoder_result(self) -> StepResult | None:
        """Return on rank 0 the output of an encoder alone, which runs all layers in one step."""
        done, self._pass = self._pass, None
        assert done is not None, "an encoder's step ends its pass"
        room = self.model.empty_hidden(len(done.batch.ids))
        hidden = self._first_rank_copy(done.output, room)
        attentions = done.attentions
        if attentions is not None and self._groups is not None:
            ranks = range(self.layout.world_size)
            shape, dtype = attentions.shape, attentions.dtype
            parts = self._groups.gather(attentions, shape, ranks=ranks, dtype=dtype)
            attentions = self._joined(parts)
        if hidden is None:
            return None
        return StepResult(torch.empty(0, 0), hidden=hidden, attentions=attentions)

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor | None:
        """Return (rows, layers, heads, S, S) of the parts of all ranks."""
        if not parts:
            return None
        tp_size = self.layout.tp_size
        stages = [
            torch.cat(parts[first : first + tp_size], dim=2)
            for first in range(0, len(parts), tp_size)
        ]
        return torch.cat(stages, dim=1)


def _is_decoding(plan: StepPlan) -> bool:
    """Return whether a step has one token for each sequence, the logits of all of them wanted."""
    return 0 < len(plan.output_rows) == len(plan.segments) == len(plan.ids)
