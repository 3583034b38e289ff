"""One rank of a decoder-only model: its layers, its cache, and the steps it runs."""

# Shapes: N tokens of a step, n tokens whose logits are wanted, V vocabulary, E hidden

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.decoder import PREFIX_PROMPT
from inference.model.decoder_weights import load_decoder
from inference.model.step import Segment, Step, make_step
from inference.model.token_feed import NEWEST
from inference.model.weights import RankWeights
from inference.ranks.base import MOST_PROMPT_TOKENS, RankBase, StepResult
from inference.ranks.device import gemm_options, layer_parameters, on_gpu
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

if TYPE_CHECKING:
    from inference.model.gpu.decode_graph import DecodeGraphs
    from inference.model.gpu.prompt_graph import PromptGraphs

# Fewest tokens for which a pipeline micro-batch is bound by computation, not by reading weights.
_MICRO_BATCH_TOKENS = 128
# Tokens of a step for which libraries choose and load their kernels before the first request.
_WARM_UP_TOKENS = (1, *(n << power for power in range(3, 12) for n in (2, 3)), MOST_PROMPT_TOKENS)


class DecoderRank(RankBase):
    """A rank that holds a part of a decoder-only model and its cache, and runs steps on them."""

    architecture: DecoderArchitecture

    def __init__(self, settings: RankSettings) -> None:
        """Load this rank's part of the model.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
            ValueError: The model does not divide among the ranks, or is not a decoder-only model.
        """
        super().__init__(settings)
        weights, architecture = self.open_weights(settings)
        if not isinstance(architecture, DecoderArchitecture):
            raise ValueError(f"{settings.ft_dir} does not hold a decoder-only model")
        self.architecture = architecture
        gemm = gemm_options(settings)
        self.model = load_decoder(weights, architecture, reduce=self.all_reduce, gemm=gemm)
        prefixes = load_prefixes(weights, architecture.num_layer)
        self.cache = self._new_cache(architecture, settings, weights.dtype, prefixes)
        self._feed = self._token_feed(settings.slots, architecture.vocab_size)
        self._group = architecture.head_num // architecture.kv_head_num
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None

    def prepare(self) -> None:
        """Record the decoding graphs, and run prompts of several lengths once."""
        if not on_gpu(self.device):
            return
        from inference.model.gpu.decode_graph import DecodeGraphs, DecoderGraphModel
        from inference.model.gpu.prompt_graph import PromptGraphs

        with torch.inference_mode():
            for tokens in _WARM_UP_TOKENS:
                self._run_nothing(tokens)
            model = DecoderGraphModel(self.model, self.cache, self._feed, self.layout)
            self._graphs = DecodeGraphs(model, sequences=self.cache.shape.slots)
            self._graphs.record()
            if self.layout.pp_size == 1:
                choice = self.architecture
                heads = (choice.head_num, choice.kv_head_num, choice.size_per_head)
                layer = layer_parameters(
                    choice.hidden, heads, choice.inter_size, gated=choice.gated
                )
                self._prompt_graphs = PromptGraphs(
                    self.model,
                    self.cache,
                    self._feed,
                    group=self._group,
                    parameters=choice.num_layer * layer // self.layout.tp_size,
                    most=_WARM_UP_TOKENS[-1] + self.cache.shape.slots,
                )
                self._prompt_graphs.record()

    def _run_nothing(self, tokens: int) -> None:
        """Run prompts of so many tokens in all, and a single token; discard their results."""
        longest, slot = self.cache.shape.max_len, self.cache.scratch_slot
        starts = range(0, tokens, longest)
        segments = [Segment(slot, 0, min(tokens - start, longest)) for start in starts]
        segments.append(Segment(slot, 0, 1))
        step = self._step(torch.zeros(tokens + 1, dtype=torch.int64), segments, torch.tensor([0]))
        first = self.layout.is_first_stage
        x = self.model.embed(step) if first else self.model.empty_hidden(step).zero_()
        x = self.model.run_layers(x, step)
        if self.layout.is_last_stage:
            logits = self.model.logits(x, step)
            if self.layout.pp_size == 1:
                nowhere = torch.tensor([[self._feed.unread], [-1]], device=self.device)
                self._feed.choose(logits, *nowhere)

    def _run(self, plan: StepPlan, embeddings: torch.Tensor | None) -> StepResult | None:
        if self._graphs is not None and is_plain_decoding(plan):
            return self._decode(self._graphs, plan)
        hidden, steps = self._layers(plan, embeddings)
        return self._result(
            self._logits(hidden, steps),
            plan,
            vocab_size=self.architecture.vocab_size,
            pooled=self._pooled(hidden, plan) if plan.pool else None,
        )

    def _layers(
        self, plan: StepPlan, embeddings: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[Step]]:
        """Return the last layer's output of each micro-batch, nothing before the last stage."""
        graphs = self._prompt_graphs
        if graphs is not None and not plan.has_virtual and graphs.hold(len(plan.ids)):
            ids, outputs = (np.array(each, np.int64) for each in (plan.ids, plan.output_rows))
            x, step = graphs.run(ids, plan.segments, outputs)
            return [x], [step]
        steps = self._micro_batches(plan, embeddings)
        hidden = self._run_stage(
            steps,
            embed=self.model.embed,
            empty_hidden=self.model.empty_hidden,
            run_layers=self.model.run_layers,
        )
        return hidden, steps

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._graphs = self._prompt_graphs = None  # they contain sums over the connection
        super().close()

    def _decode(self, graphs: DecodeGraphs, plan: StepPlan) -> StepResult | None:
        graph = graphs.graph(len(plan.segments))
        numbers = np.empty((5, len(plan.segments)), np.int64)
        numbers[0] = plan.ids
        numbers[1] = [segment.slot for segment in plan.segments]
        numbers[2] = [segment.start for segment in plan.segments]
        numbers[3] = numbers[2] + [segment.shift for segment in plan.segments]
        numbers[4] = -1 if plan.choices is None else [banned for _, banned in plan.choices]
        graph.fill(numbers)
        return self._run_graph(graph, plan, self.architecture.vocab_size)

    def _step(
        self,
        ids: torch.Tensor,
        segments: Sequence[Segment],
        outputs: torch.Tensor,
        *,
        has_virtual: bool = False,
        embeddings: torch.Tensor | None = None,
    ) -> Step:
        """Lay out some tokens; `ids` and `outputs` are on the CPU."""
        if on_gpu(self.device):
            from inference.model.gpu.paged_step import make_paged_step

            return make_paged_step(
                ids.numpy(),
                segments,
                outputs.numpy(),
                cache=self.cache,
                rules=self.model.rules,
                group=self._group,
                feed=self._feed,
                has_virtual=has_virtual,
                embeddings=embeddings,
            )
        if NEWEST in ids.numpy():  # a tenth of the time of torch's search
            slots = [segment.slot for segment in segments for _ in range(segment.count)]
            ids = self._feed.ids(ids.to(self.device), torch.tensor(slots, device=self.device))
        return make_step(
            ids.to(self.device),
            segments,
            outputs.to(self.device),
            cache=self.cache,
            rules=self.model.rules,
            dtype=self.model.dtype,
            has_virtual=has_virtual,
            embeddings=embeddings,
        )

    def _micro_batches(self, plan: StepPlan, embeddings: torch.Tensor | None) -> list[Step]:
        parts = min(self.layout.pp_size, max(1, len(plan.ids) // _MICRO_BATCH_TOKENS))
        ids, outputs = (
            torch.tensor(each, dtype=torch.int64) for each in (plan.ids, plan.output_rows)
        )
        steps, first = [], 0
        for segments in split_segments(plan.segments, parts):
            stop = first + sum(segment.count for segment in segments)
            mine = outputs
            if parts > 1:
                mine = outputs[(outputs >= first) & (outputs < stop)] - first
            step = self._step(
                ids[first:stop],
                segments,
                mine,
                has_virtual=plan.has_virtual,
                embeddings=embeddings,
            )
            steps.append(step)
            first = stop
        return steps

    def _logits(self, hidden: Sequence[torch.Tensor], steps: Sequence[Step]) -> torch.Tensor | None:
        """Return this rank's slice of the logits (n, V / T or more), None without."""
        pairs = zip(hidden, steps, strict=True) if hidden else ()
        slices = [self.model.logits(x, step) for x, step in pairs if len(step.output_rows)]
        if not slices:
            return None
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def _pooled(self, hidden: Sequence[torch.Tensor], plan: StepPlan) -> torch.Tensor | None:
        """Return on rank 0 the sum of each segment's last hidden states, (segments, E) fp32."""
        sums = None
        if hidden:
            counts = [segment.count for segment in plan.segments]
            parts = torch.split(torch.cat(list(hidden)).float(), counts)
            sums = torch.stack([part.sum(0) for part in parts])
        shape = (len(plan.segments), self.architecture.hidden)
        room = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._first_rank_copy(sums, room)


def is_plain_decoding(plan: StepPlan) -> bool:
    """Return whether a step is one real token per sequence, the logits of all of them wanted."""
    return (
        len(plan.output_rows) == len(plan.segments) == len(plan.ids)
        and not plan.has_virtual
        and not plan.pool
    )


def load_prefixes(weights: RankWeights, num_layer: int) -> list[torch.Tensor]:
    """Return the loaded prefix prompts of this stage's layers, (L, 2, H, tokens, D) each.

    Raises:
        CheckpointMismatchError: Some hold values that are not finite.
    """
    config, layers = weights.reader.config, weights.layout.layers(num_layer)
    if config.prompt_learning_type != PREFIX_PROMPT:
        return []
    names = [f"model.prefix_prompt.{task.task_name}.weight" for task in config.tasks]
    prefixes = [weights.tensor(name)[layers.start : layers.stop] for name in names]
    weights.check()
    return prefixes


def split_segments(segments: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Split segments into at most `parts` runs of about as many tokens, in order.

    A sequence may be split: a later run then holds its later tokens, which see the earlier ones.
    """
    total = sum(segment.count for segment in segments)
    if parts == 1:
        return [list(segments)]
    size = -(-total // parts)
    runs: list[list[Segment]] = [[]]
    room = size
    for segment in segments:
        start, left = segment.start, segment.count
        while left:
            if not room:
                runs.append([])
                room = size
            count = min(left, room)
            runs[-1].append(replace(segment, start=start, count=count))
            start, left, room = start + count, left - count, room - count
    return runs
