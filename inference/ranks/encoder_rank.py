"""One rank of a BERT-like encoder: rows of hidden states in, rows of hidden states out."""

# Shapes: N tokens of all rows, E hidden

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from export_scripts.families.layout.architecture import EncoderArchitecture
from inference.model.encoder import Encoder
from inference.model.ragged import ragged_rows
from inference.ranks.base import RankBase, StepResult
from inference.ranks.device import has_row_kernels
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

if TYPE_CHECKING:
    from inference.model.gpu.encoder_graph import EncoderGraphs


class EncoderRank(RankBase):
    """A rank that holds a part of a BERT-like encoder."""

    architecture: EncoderArchitecture
    _graphs: EncoderGraphs | None = None

    def __init__(self, settings: RankSettings) -> None:
        super().__init__(settings)
        weights = self.open_weights(settings)
        self.model = Encoder(weights, self.architecture, reduce=self.all_reduce)
        self._tiled = has_row_kernels(self.device, weights.dtype)

    def prepare(self) -> None:
        """Record the graphs."""
        if not self._tiled or self.layout.pp_size > 1:
            return
        from inference.model.gpu.encoder_graph import EncoderGraphs

        with torch.inference_mode():
            self._graphs = EncoderGraphs(
                self.model.run_layers,
                self.model.empty_hidden,
                parameters=self._parameters(self.architecture),
                device=self.device,
            )
            self._graphs.record()

    def _run(self, plan: StepPlan, embeddings: torch.Tensor | None) -> StepResult | None:
        lengths = [row.count for row in plan.encoder_rows]
        rows = ragged_rows(lengths, self.device, tiled=self._tiled)
        output = None
        if self.layout.is_first_stage:
            assert embeddings is not None
            embeddings = embeddings.to(self.model.dtype)
            if self._graphs is not None:
                output = self._graphs.run(embeddings, rows)  # None where no graph serves the rows
        if output is None:
            hidden = self._run_stage([rows], lambda _: cast(torch.Tensor, embeddings))
            output = hidden[0] if hidden else None
        output = self._first_rank_copy(output, self.model.empty_hidden(sum(lengths)))
        return None if output is None else StepResult(torch.empty(0, 0), hidden=output)
