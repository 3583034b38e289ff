"""One rank of an encoder-decoder.

A step first encodes new rows, whose keys and values every stage caches in separate slots, and then
runs the decoder over the new tokens of each sequence.
"""

# Shapes: N tokens of an encoder pass, E hidden

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.encoder_decoder import EncodedRow, EncoderDecoder, cross_segments
from inference.model.kv_cache import encoder_slot, on_device
from inference.model.step import CachedAttention, Segment, Tokens
from inference.ranks.base import StepResult
from inference.ranks.encoder_rank import EncoderRank
from inference.ranks.generator_rank import GeneratorRank
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

# Step sizes to run before the first request, so that libraries choose and load their kernels.
_WARM_UP_TOKENS = (1, 16, 64, 256, 1024)


class EncoderDecoderRank(EncoderRank, GeneratorRank):
    """A rank of an encoder-decoder."""

    architecture: EncoderDecoderArchitecture
    model: EncoderDecoder

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        self._open_cache(settings, self.model.dtype)
        nothing = EncodedRow(self.cache.scratch_slot, 1, self._no_task)
        self._encoded = [nothing] * (settings.slots + 1)  # encoder output of each decoder slot

    def prepare(self) -> None:
        """Record the graphs of encoder and decoder, and run other step sizes once."""
        super().prepare()
        if self.device.type != "cpu":
            with torch.inference_mode():
                self._record(_WARM_UP_TOKENS, idle=(self.cache.scratch_slot, 0, self._no_task))

    def _run(self, plan: StepPlan, embeddings: Tensor | None) -> StepResult | None:
        if plan.encoder_rows:
            self._begin(plan, embeddings)
        if plan.encoder_rows or plan.encoder_layers:
            self._encode_some(plan.encoder_layers or self.architecture.num_layer)
        if self._graphs is not None and plan.is_decoding:
            encoded = [self._encoded[segment.slot] for segment in plan.segments]
            numbers = [(each.slot, each.length - 1, each.task) for each in encoded]
            return self._run_graph(plan, *zip(*numbers, strict=True))
        part = self._logits(*self._run_steps(plan)) if plan.segments else None
        return self._result(part, plan)

    def _encode_some(self, layers: int) -> None:
        """Continue the pass; at its end every stage caches keys and values for its decoder."""
        done = self._encode(layers)
        if done is None:
            return
        output = self._broadcast_output(done.x, done.tokens)
        targets = [encoder_slot(row.slots, self.cache.shape.slots) for row in done.rows]
        self.model.cache_encoded(output, done.step, targets, self.cache)
        for row, target, task in zip(done.rows, targets, done.tasks, strict=True):
            encoded = EncodedRow(target, row.tokens, task)
            for slot in row.slots:
                self._encoded[slot] = encoded

    def _broadcast_output(self, output: Tensor | None, tokens: Tokens) -> Tensor:
        """Send the last stage's encoder output (N, E) to every stage, and return it."""
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

    def _cross_attention(
        self, segments: Sequence[Segment]
    ) -> tuple[CachedAttention | None, Tensor | None]:
        counts = [segment.tokens for segment in segments]
        encoded = [self._encoded[segment.slot] for segment in segments]
        rules, tasks = self.model.rules, None
        if self.architecture.ia3_num_tasks:
            tasks = on_device(np.repeat([each.task for each in encoded], counts), self.device)
        if self.device.type == "cpu":
            return self._attention(cross_segments(segments, encoded), rules.across), tasks
        from inference.model.gpu.attention_layout import paged_attention

        # Each token takes the place of the encoder's last token, which sees all of them.
        last = [(each.slot, each.length - 1, 1) for each in encoded]
        each_token = np.repeat(np.array(last), counts, axis=0)
        return paged_attention(each_token, self.cache, rules=rules.across), tasks
