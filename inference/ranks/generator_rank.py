"""A generating rank: its cache, and the steps of its decoder.

The tokens of an encoder-decoder also read the encoder's output; subclasses add that.
"""

# Shapes: N tokens of a step, n tokens whose logits are wanted, V vocabulary, E hidden

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import (
    DecoderArchitecture,
    EncoderDecoderArchitecture,
)
from inference.model.cached_attention import GroupedAttention
from inference.model.kv_cache import Array, KVCache, on_device
from inference.model.stage import GeneratorModel
from inference.model.step import AttentionRules, CachedAttention, Segment, Step, segment_numbers
from inference.model.token_feed import TokenFeed
from inference.ranks.base import RankBase, StepResult, cache_shape
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

# With fewer tokens, reading the weights would dominate the time of a pipeline's micro-batch.
_MICRO_BATCH_TOKENS = 128


class GeneratorRank(RankBase):
    """A rank of a generating model."""

    architecture: DecoderArchitecture | EncoderDecoderArchitecture
    model: GeneratorModel
    _feed: TokenFeed

    def _open_cache(
        self, settings: RankSettings, dtype: torch.dtype, prefixes: Sequence[Tensor] = ()
    ) -> None:
        """Allocate the state between steps: keys and values, and the newest tokens."""
        layout, vocab_size = self.layout, self.architecture.vocab_size
        shape = cache_shape(self.architecture, settings)
        self.cache = KVCache(shape, dtype=dtype, device=self.device, prefixes=prefixes)
        self._feed = TokenFeed(
            settings.slots,
            self.device,
            vocab=layout.vocab_rows(vocab_size),
            vocab_size=vocab_size,
            # A function, since the ranks connect later.
            gather=(lambda x: self.groups.gather_stage(x)) if layout.tp_size > 1 else None,
        )

    def _record(self, warm_up: Iterable[int], idle: Sequence[int] = ()) -> None:
        """Run a step of each number of tokens in `warm_up`, and record the decoding graphs.

        `idle` as for `DecodeGraphs`.
        """
        from inference.model.gpu.decode_graph import DecodeGraphs

        for tokens in warm_up:
            self._run_dummy(tokens)
        self._graphs = DecodeGraphs(self.model, self.cache, self._feed, self.layout, idle=idle)
        self._graphs.record()

    def _run_dummy(self, tokens: int) -> None:
        """Run prompts of `tokens` tokens in total and a single token, and discard the results."""
        longest, slot = self.cache.shape.max_len, self.cache.scratch_slot
        starts = range(0, tokens, longest)
        segments = [Segment(slot, 0, min(tokens - start, longest)) for start in starts]
        segments.append(Segment(slot, 0, 1))
        step = self._step(np.zeros(tokens + 1, np.int64), segments, np.zeros(1, np.int64))
        first = self.layout.is_first_stage
        x = self.model.embed(step) if first else self.model.empty_hidden(tokens + 1).zero_()
        x = self.model.run_layers(x, step)
        if self.layout.is_last_stage:
            logits = self.model.logits(x, step)
            if self.layout.pp_size == 1:
                nowhere = torch.tensor([[self._feed.unread], [-1]], device=self.device)
                self._feed.choose(logits, *nowhere)

    def _run_steps(
        self,
        plan: StepPlan,
        *,
        has_virtual: bool = False,
        embeddings: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Step]]:
        """Return the micro-batches, with their last layer's outputs on the last stage only."""
        parts = min(self.layout.pp_size, max(1, len(plan.ids) // _MICRO_BATCH_TOKENS))
        ids, outputs = (np.array(each, np.int64) for each in (plan.ids, plan.output_rows))
        steps, first = [], 0
        for segments in split_segments(plan.segments, parts):
            stop = first + sum(segment.tokens for segment in segments)
            rows = outputs
            if parts > 1:
                rows = outputs[(outputs >= first) & (outputs < stop)] - first
            step = self._step(
                ids[first:stop], segments, rows, has_virtual=has_virtual, embeddings=embeddings
            )
            # The last layer computes only rows with logits, unless hidden states are pooled.
            outputs_only = self.model.can_select_rows and not plan.pool
            steps.append(replace(step, outputs_only=outputs_only and self.layout.is_last_stage))
            first = stop
        return self._run_stage(steps), steps

    def _run_stage(self, micro_batches: Sequence[Step]) -> list[Tensor]:
        """Return the last layer's output of each micro-batch; empty before the last stage.

        While a stage computes one micro-batch, the next stage computes the previous one.
        """
        outputs, sends = [], []
        for step in micro_batches:
            if self.layout.is_first_stage:
                x = self.model.embed(step)
            else:
                buffer = self.model.empty_hidden(len(step.positions))
                x = self.groups.receive(buffer, self.layout.previous_rank)
            x = self.model.run_layers(x, step)
            if self.layout.is_last_stage:
                outputs.append(x)
            else:
                sends.append(self.groups.send(x, self.layout.next_rank))
        for sent in sends:
            sent.wait()
        return outputs

    def _step(
        self,
        ids: Array,
        segments: Sequence[Segment],
        outputs: Array,
        *,
        has_virtual: bool = False,
        embeddings: Tensor | None = None,
    ) -> Step:
        encoded, tasks = self._cross_attention(segments)
        attention, count = self._attention(segments, self.model.rules), len(ids)
        numbers = segment_numbers(segments)
        shifts = np.repeat(numbers[:, 3], numbers[:, 2])
        # One copy to the device, without a synchronisation.
        sent = on_device(np.concatenate((ids, shifts, outputs)).astype(np.int32), self.device)
        return Step(
            ids=self._feed.ids(sent[:count], attention.slots),
            positions=attention.places + sent[count : 2 * count],
            output_rows=sent[2 * count :],
            attention=attention,
            has_virtual=has_virtual,
            embeddings=embeddings,
            encoded=encoded,
            tasks=tasks,
        )

    def _attention(self, segments: Sequence[Segment], rules: AttentionRules) -> Any:
        """Return the step's `CachedAttention`, with the `slots` and `places` of its tokens."""
        if self.device.type == "cpu":
            return GroupedAttention(segments, self.cache, rules=rules, dtype=self.model.dtype)
        from inference.model.gpu.attention_layout import paged_attention

        return paged_attention(segment_numbers(segments), self.cache, rules=rules)

    def _cross_attention(
        self, segments: Sequence[Segment]
    ) -> tuple[CachedAttention | None, Tensor | None]:
        """Return the tokens' attention over the encoder's output, and their IA3 tasks."""
        del segments
        return None, None

    def _logits(self, hidden: Sequence[Tensor], steps: Sequence[Step]) -> Tensor | None:
        """Return this rank's slice of the logits (n, V / T or more), None if none are wanted."""
        pairs = zip(hidden, steps, strict=True) if hidden else ()
        slices = [self.model.logits(x, step) for x, step in pairs if len(step.output_rows)]
        if not slices:
            return None
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _run_graph(self, plan: StepPlan, *more: Sequence[int]) -> StepResult | None:
        """Run a decoding graph, with the transfers between stages; return the result on rank 0.

        `more` holds further numbers of each sequence, see `idle` of `DecodeGraphs`.
        """
        segments, count = plan.segments, len(plan.segments)
        numbers = np.empty((5 + len(more), count), np.int64)
        numbers[0] = plan.ids
        slots, starts, _, shifts = segment_numbers(segments).T
        numbers[1:4] = slots, starts, starts + shifts
        for place, each in enumerate(more, 4):
            numbers[place] = each
        numbers[-1] = -1 if plan.choices is None else [banned for _, banned in plan.choices]
        graph = self._graphs.holding(count)
        assert graph is not None, "more sequences than slots"
        graph.fill(numbers)
        if graph.hidden is not None:
            self.groups.receive(graph.hidden, self.layout.previous_rank)
        graph.graph.replay()
        if not self.layout.is_last_stage:
            self.groups.send(graph.output, self.layout.next_rank).wait()
            return self._result(None, plan)
        part, chosen = graph.output[:count], None
        if plan.choices is not None:
            chosen, sent = graph.chosen[:count], graph.numbers[:, :count]
            if plan.draws is not None:
                chosen = self._choose(part, sent[1], sent[-1], plan)
        return self._result(part, plan, chosen=chosen)

    def _result(
        self,
        part: Tensor | None,
        plan: StepPlan,
        *,
        pooled: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> StepResult | None:
        """Return on rank 0 the tokens that the ranks choose by the plan, or all logits, or both.

        `part` is this rank's slice of the logits, (n, V / T or more), if it has one; `chosen` are
        the tokens if they are known already.
        """
        count = len(plan.output_rows)
        if plan.choices is not None and count and chosen is None:
            assert part is not None, "stages of a pipeline choose no tokens"
            slots, forbidden = on_device(np.array(plan.choices, np.int64).T.copy(), self.device)
            slots = torch.where(slots < 0, self._feed.unread, slots)
            chosen = self._choose(part, slots, forbidden, plan)
        logits = None
        if count and (chosen is None or plan.with_logits):
            logits = part
            if self._groups is not None:  # rank 0 gathers the last stage's slices
                shape = (count, self.layout.vocab_rows_per_rank(self.architecture.vocab_size))
                slices = self._groups.gather(part, shape, ranks=self.layout.last_stage_ranks)
                logits = torch.cat(slices, dim=1) if slices else None
        if self.layout.rank != 0:
            return None
        if chosen is not None:
            chosen = chosen.to("cpu", non_blocking=True)  # into pinned memory, by the GPU itself
        done = None
        if self.device.type != "cpu":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return StepResult(
            torch.empty(0, self.architecture.vocab_size) if logits is None else logits,
            pooled,
            chosen=chosen,
            done=done,
        )

    def _choose(self, part: Tensor, slots: Tensor, forbidden: Tensor, plan: StepPlan) -> Tensor:
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


def split_segments(segments: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Split segments in order into at most `parts` runs of about equal numbers of tokens.

    A sequence may be split; its tokens in a later run see those in earlier runs.
    """
    total = sum(segment.tokens for segment in segments)
    if parts == 1:
        return [list(segments)]
    size = -(-total // parts)
    runs: list[list[Segment]] = [[]]
    free = size
    for segment in segments:
        start, left = segment.start, segment.tokens
        while left:
            if not free:
                runs.append([])
                free = size
            count = min(left, free)
            runs[-1].append(segment._replace(start=start, tokens=count))
            start, left, free = start + count, left - count, free - count
    return runs
