"""One rank of an encoder: BERT, a T5 encoder, or the encoder of a whole T5.

An encoder's rows cannot be split like a decoder's prompts, since every token sees all others.
Instead its layers can be spread over several steps, so that long rows do not delay decoding.
"""

# Shapes: N tokens of an encoder pass, E hidden, H local heads, S longest row

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import (
    EncoderArchitecture,
    EncoderDecoderArchitecture,
)
from inference.model.encoder import Bert, Encoder
from inference.model.encoder_decoder import EncoderDecoder
from inference.model.kv_cache import on_device
from inference.model.ragged import EncoderStep, ragged_rows
from inference.model.step import Tokens
from inference.ranks.base import RankBase, StepResult
from inference.ranks.device import has_row_kernels
from inference.ranks.plan import EncoderRow, StepPlan
from inference.ranks.settings import RankSettings


@dataclass
class _EncoderPass:
    """One batch in the encoder; all ranks advance it in the same steps."""

    rows: tuple[EncoderRow, ...]
    tokens: Tokens
    step: EncoderStep
    tasks: list[int]  # of IA3, by row
    done: int = 0  # number of finished layers, over all stages
    x: Tensor | None = None  # (N, E) while this stage computes; at the end the last stage's output


class EncoderRank(RankBase):
    """A rank of an encoder."""

    architecture: EncoderArchitecture | EncoderDecoderArchitecture
    model: Encoder

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        weights = self.open_weights(settings)
        if isinstance(self.architecture, EncoderDecoderArchitecture):
            if settings.encoder_only:
                self.architecture = replace(self.architecture, decoder_num_layer=0)
            self._no_task = self.architecture.ia3_num_tasks  # row of ones at the end of each table
            kind: type[Encoder] = EncoderDecoder
        else:
            self._no_task, kind = 0, Bert
        self.model = kind(weights, self.architecture)
        self._tiled = has_row_kernels(self.device, weights.dtype)
        self._pass: _EncoderPass | None = None

    def prepare(self) -> None:
        """Record the graphs of the encoder."""
        if not self._tiled or self.layout.pp_size > 1:
            return
        from inference.model.gpu.encoder_graph import EncoderGraphs

        empty = self.model.empty_hidden
        if isinstance(self.architecture, EncoderDecoderArchitecture):
            empty = self._empty_ids
        with torch.inference_mode():
            self._encoder_graphs = EncoderGraphs(
                self.model.encode, empty, parameters=self._parameters(), device=self.device
            )
            self._encoder_graphs.record()

    def _empty_ids(self, tokens: int) -> Tensor:
        return torch.empty(tokens, dtype=torch.int64, device=self.device)

    def _run(self, plan: StepPlan, embeddings: Tensor | None) -> StepResult | None:
        """Run all layers of an encoder-only model; return the output on rank 0."""
        self._begin(plan, embeddings)
        done = self._encode(self.architecture.num_layer)
        assert done is not None, "an encoder's step ends its pass"
        sizes = (len(done.tokens.ids), self.architecture.hidden)
        hidden = self._send_to_first_rank(done.x, sizes, self.model.dtype)
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

    def _begin(self, plan: StepPlan, embeddings: Tensor | None) -> None:
        """Start a pass of new rows, in place of any unfinished one, whose requests were dropped."""
        counts = [row.tokens for row in plan.encoder_rows]
        rows = ragged_rows(counts, self.device, tiled=self._tiled)
        tasks = [self._no_task if row.task is None else row.task for row in plan.encoder_rows]
        attentions = None
        if plan.attentions:
            heads = self.architecture.head_num // self.layout.tp_size
            shape = (len(counts), len(self.model.encoder_layers), heads, max(counts), max(counts))
            attentions = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        ids = embeddings  # hidden states, for a model whose embedding layer runs at the client
        if plan.encoder_ids or ids is None:
            ids = on_device(np.array(plan.encoder_ids, np.int64), self.device)
        tokens = Tokens(
            ids=ids,
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

    def _encode(self, layers: int) -> _EncoderPass | None:
        """Run `layers` more layers of the pass; return the pass once it is finished."""
        current, total = self._pass, self.architecture.num_layer
        assert current is not None, "no pass was begun"
        start = current.done
        current.done = min(start + layers, total)
        if current.done - start == total:
            step, is_virtual = current.step, current.tokens.has_virtual
            plain = step.tasks is None and not is_virtual and step.attentions is None
            if self._encoder_graphs is not None and plain:  # None where no graph serves the rows
                current.x = self._encoder_graphs.run(current.tokens.ids, step.rows)
        if current.x is None or start:
            self._advance(current, start)
        if current.done < total:
            return None
        self._pass = None
        return current

    def _advance(self, current: _EncoderPass, start: int) -> None:
        """Run this stage's layers from `start` to `current.done`, and send on its output."""
        mine, layout, stop = self.model.encoder_layers, self.layout, current.done
        if start == 0 and layout.is_first_stage:
            current.x = self.model.embed(current.tokens)
        elif start < mine.start <= stop:
            buffer = self.model.empty_hidden(len(current.tokens.ids))
            current.x = self.groups.receive(buffer, layout.previous_rank)
        if layers := range(max(start, mine.start), min(stop, mine.stop)):
            assert current.x is not None
            current.x = self.model.run_encoder(current.x, current.step, layers)
        if start < mine.stop <= stop:
            assert current.x is not None
            if layout.is_last_stage:
                current.x = self.model.finish_encoder(current.x)
            else:
                self.groups.send(current.x, layout.next_rank).wait()
                current.x = None
