"""One rank of an encoder-decoder, or of its encoder alone.

A step first encodes new rows, whose keys and values every stage caches in slots of their own, and
then runs the decoder over the new tokens of each sequence. An encoder's rows cannot be split like a
decoder's prompts, since every token sees all others. Its layers can be spread over several steps: a
long row then does not delay the rows that decode.
"""

# Shapes: N tokens of an encoder pass, E hidden, H local heads, S longest row

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.encoder_decoder import EncodedRow, EncoderDecoder, reading_segments
from inference.model.kv_cache import encoder_slot, on_device
from inference.model.ragged import EncoderStep, ragged_rows
from inference.model.step import CachedAttention, Segment, Tokens
from inference.ranks.base import StepResult
from inference.ranks.device import gemm_options, has_row_kernels
from inference.ranks.generator_rank import GeneratorRank
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.settings import RankSettings

if TYPE_CHECKING:
    from inference.model.gpu.encoder_graph import EncoderGraphs

# Tokens of a step for which libraries choose and load their kernels before the first request.
_WARM_UP_TOKENS = (1, 16, 64, 256, 1024)


@dataclass
class _EncoderPass:
    """One batch in the encoder; every rank advances in the same steps."""

    rows: tuple[EncoderRow, ...]
    tokens: Tokens
    step: EncoderStep
    tasks: list[int]  # of IA3, by row
    done: int = 0  # layers, of all stages
    x: Tensor | None = None  # (N, E) while this stage computes, and the last one's output


class EncoderDecoderRank(GeneratorRank):
    """A rank that holds a part of an encoder-decoder and its cache, or of an encoder alone."""

    architecture: EncoderDecoderArchitecture
    model: EncoderDecoder
    _encoder_graphs: EncoderGraphs | None = None

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        weights = self.open_weights(settings)
        if settings.encoder_only:
            self.architecture = replace(self.architecture, decoder_num_layer=0)
        architecture = self.architecture
        gemm = gemm_options(settings)
        self.model = EncoderDecoder(weights, architecture, reduce=self.all_reduce, gemm=gemm)
        self._no_task = architecture.ia3_num_tasks  # names a row of ones in every table
        if architecture.decoder_num_layer:
            self._open_cache(settings, weights.dtype)
            nothing = EncodedRow(self.cache.scratch_slot, 1, self._no_task)
            self._encoded = [nothing] * (settings.slots + 1)  # what each slot reads
        self._tiled = has_row_kernels(self.device, weights.dtype)
        self._pass: _EncoderPass | None = None

    def prepare(self) -> None:
        """Record the graphs of encoder and decoder, and run steps that are not graphs once."""
        if self.device.type == "cpu":
            return
        with torch.inference_mode():
            if self._tiled and self.layout.pp_size == 1:
                from inference.model.gpu.encoder_graph import EncoderGraphs

                self._encoder_graphs = EncoderGraphs(
                    self.model.encode,
                    lambda tokens: torch.zeros(tokens, dtype=torch.int64, device=self.device),
                    parameters=self._parameters(),
                    device=self.device,
                )
                self._encoder_graphs.record()
            if self.architecture.decoder_num_layer:
                self._record(_WARM_UP_TOKENS, idle=(self.cache.scratch_slot, 0, self._no_task))

    def _run(self, plan: StepPlan, embeddings: Tensor | None) -> StepResult | None:
        if plan.encoder_rows:
            self._begin(plan, embeddings)
        if plan.encoder_rows or plan.encoder_layers:
            self._encode(plan.encoder_layers or self.architecture.num_layer)
        if not self.architecture.decoder_num_layer:
            return self._encoder_result()
        if self._graphs is not None and plan.is_decoding:
            encoded = [self._encoded[segment.slot] for segment in plan.segments]
            numbers = [(each.slot, each.length - 1, each.task) for each in encoded]
            return self._run_graph(self._graphs, plan, *zip(*numbers, strict=True))
        part = self._logits(*self._run_steps(plan)) if plan.segments else None
        return self._result(part, plan)

    def _begin(self, plan: StepPlan, embeddings: Tensor | None) -> None:
        """Start a pass of new rows; it replaces one whose requests were cancelled."""
        counts = [row.count for row in plan.encoder_rows]
        rows = ragged_rows(counts, self.device, tiled=self._tiled)
        tasks = [self._no_task if row.task is None else row.task for row in plan.encoder_rows]
        attentions = None
        if plan.attentions:
            heads = self.architecture.head_num // self.layout.tp_size
            shape = (len(counts), len(self.model.encoder_layers), heads, max(counts), max(counts))
            attentions = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        tokens = Tokens(
            ids=on_device(np.array(plan.encoder_ids, np.int64), self.device),
            positions=rows.positions,
            has_virtual=plan.has_virtual,
            embeddings=embeddings,
        )
        step = EncoderStep(
            *(rows, self.model.encoder_rules),
            tasks=rows.per_token(tasks) if any(t != self._no_task for t in tasks) else None,
            attentions=attentions,
        )
        self._pass = _EncoderPass(plan.encoder_rows, tokens, step, tasks)

    def _encode(self, layers: int) -> None:
        """Continue the pass; at its end every stage caches what its decoder layers read."""
        now, total = self._pass, self.architecture.num_layer
        assert now is not None, "no pass was begun"
        start = now.done
        now.done = min(start + layers, total)
        if now.done - start == total:
            step, is_virtual = now.step, now.tokens.has_virtual
            plain = step.tasks is None and not is_virtual and step.attentions is None
            if self._encoder_graphs is not None and plain:  # None where no graph serves the rows
                now.x = self._encoder_graphs.run(now.tokens.ids, step.rows)
        if now.x is None or start:
            self._advance(now, start)
        if now.done < total or not self.architecture.decoder_num_layer:
            return
        output = self._spread(now.x, now.tokens)
        targets = [encoder_slot(row.slots, self.cache.shape.slots) for row in now.rows]
        self.model.cache_encoded(output, now.step, targets, self.cache)
        for row, target, task in zip(now.rows, targets, now.tasks, strict=True):
            encoded = EncodedRow(target, row.count, task)
            for slot in row.slots:
                self._encoded[slot] = encoded
        self._pass = None

    def _advance(self, now: _EncoderPass, start: int) -> None:
        """Run this stage's layers from `start` to those done; send the result of the last."""
        mine, layout, stop = self.model.encoder_layers, self.layout, now.done
        if start == 0 and layout.is_first_stage:
            now.x = self.model.embed(now.tokens)
        elif start < mine.start <= stop:
            room = self.model.empty_hidden(len(now.tokens.ids))
            now.x = self.groups.receive(room, layout.previous_rank)
        if layers := range(max(start, mine.start), min(stop, mine.stop)):
            assert now.x is not None
            now.x = self.model.run_encoder(now.x, now.step, layers)
        if start < mine.stop <= stop:
            assert now.x is not None
            if layout.is_last_stage:
                now.x = self.model.finish_encoder(now.x)
            else:
                self.groups.send(now.x, layout.next_rank).wait()
                now.x = None

    def _spread(self, output: Tensor | None, tokens: Tokens) -> Tensor:
        """Send the last stage's encoder output (N, E) to every stage."""
        layout = self.layout
        if layout.pp_size == 1:
            assert output is not None
            return output
        if output is None:
            source = layout.last_stage_ranks[layout.tp_rank]
            return self.groups.receive(self.model.empty_hidden(len(tokens.ids)), source)
        sends = [
            self.groups.send(output, stage * layout.tp_size + layout.tp_rank)
            for stage in range(layout.pp_size - 1)
        ]
        for sent in sends:
            sent.wait()
        return output

    def _read_by(self, segments: Sequence[Segment]) -> tuple[CachedAttention | None, Tensor | None]:
        counts = [segment.count for segment in segments]
        encoded = [self._encoded[segment.slot] for segment in segments]
        rules, tasks = self.model.rules, None
        if self.architecture.ia3_num_tasks:
            tasks = on_device(np.repeat([each.task for each in encoded], counts), self.device)
        if self.device.type == "cpu":
            reading = reading_segments(segments, encoded)
            return self._attention(reading, rules.across), tasks
        from inference.model.gpu.attention_layout import paged_attention

        # As if each token were the last of the encoder's: it sees all of them.
        last = [(each.slot, each.length - 1, 1) for each in encoded]
        each_token = np.repeat(np.array(last), counts, axis=0)
        return paged_attention(each_token, self.cache, rules=rules.across), tasks

    def _encoder_result(self) -> StepResult | None:
        """Return on rank 0 the output of an encoder alone, which runs all layers in one step."""
        done, self._pass = self._pass, None
        assert done is not None, "an encoder's step ends its pass"
        room = self.model.empty_hidden(len(done.tokens.ids))
        hidden = self._first_rank_copy(done.x, room)
        attentions = done.step.attentions  # (rows, stage's layers, heads, S, S)
        if attentions is not None and self._groups is not None:
            ranks, tp_size = range(self.layout.world_size), self.layout.tp_size
            shape, dtype = attentions.shape, attentions.dtype
            parts = self._groups.gather(attentions, shape, ranks=ranks, dtype=dtype)
            starts = range(0, len(parts), tp_size)
            stages = [torch.cat(parts[first : first + tp_size], dim=2) for first in starts]
            attentions = torch.cat(stages, dim=1) if stages else None
        if hidden is None:
            return None
        return StepResult(torch.empty(0, 0), hidden=hidden, attentions=attentions)
