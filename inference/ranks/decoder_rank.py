"""One rank of a decoder-only model: its layers, its cache, and the steps it runs."""

# Shapes: E hidden

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.families.layout.decoder import PREFIX_PROMPT
from inference.model.decoder import Decoder
from inference.ranks.base import MAX_PROMPT_TOKENS, StepResult
from inference.ranks.generator_rank import GeneratorRank
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

# Step sizes to run before the first request, so that libraries choose and load their kernels.
_WARM_UP_TOKENS = (1, *(n << power for power in range(3, 12) for n in (2, 3)), MAX_PROMPT_TOKENS)


class DecoderRank(GeneratorRank):
    """A rank of a decoder-only model."""

    architecture: DecoderArchitecture
    model: Decoder

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        weights, architecture = self.open_weights(settings), self.architecture
        self.model = Decoder(weights, architecture)
        config, layers = weights.reader.config, self.layout.layers(architecture.num_layer)
        prefixes = []  # each (L, 2, H, tokens, D), L layers of this stage
        if config.prompt_learning_type == PREFIX_PROMPT:
            names = [f"model.prefix_prompt.{task.task_name}.weight" for task in config.tasks]
            prefixes = [weights.tensor(name)[layers.start : layers.stop] for name in names]
            weights.check()
        self._open_cache(settings, weights.dtype, prefixes)

    def prepare(self) -> None:
        """Record the decoding graphs, and run prompts of several lengths once."""
        if self.device.type == "cpu":
            return
        from inference.model.gpu.prompt_graph import PromptGraphs

        with torch.inference_mode():
            self._record(_WARM_UP_TOKENS)
            if self.layout.pp_size == 1:
                self._prompt_graphs = PromptGraphs(
                    self.model,
                    self.cache,
                    self._feed,
                    parameters=self._parameters(),
                    most=_WARM_UP_TOKENS[-1] + self.cache.shape.slots,
                )
                self._prompt_graphs.record()

    def _run(self, plan: StepPlan, embeddings: Tensor | None) -> StepResult | None:
        if self._graphs is not None and plan.is_decoding and not (plan.has_virtual or plan.pool):
            return self._run_graph(plan)
        found = None
        if self._prompt_graphs is not None and not plan.has_virtual:
            ids, outputs = (np.array(each, np.int64) for each in (plan.ids, plan.output_rows))
            found = self._prompt_graphs.run(ids, plan.segments, outputs)
        if found is None:
            hidden, steps = self._run_steps(
                plan, has_virtual=plan.has_virtual, embeddings=embeddings
            )
        else:
            hidden, steps = [found[0]], [found[1]]
        pooled = self._pooled(hidden, plan) if plan.pool else None
        return self._result(self._logits(hidden, steps), plan, pooled=pooled)

    def _pooled(self, hidden: Sequence[Tensor], plan: StepPlan) -> Tensor | None:
        """Return the sum of each segment's last hidden states on rank 0, (segments, E) fp32."""
        sums = None
        if hidden:
            counts = [segment.tokens for segment in plan.segments]
            parts = torch.split(torch.cat(list(hidden)).float(), counts)
            sums = torch.stack([part.sum(0) for part in parts])
        return self._send_to_first_rank(sums, (len(plan.segments), self.architecture.hidden))
