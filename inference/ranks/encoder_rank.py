"""One rank of a BERT-like encoder: rows of hidden states in, rows of hidden states out."""

# Shapes: N tokens of all rows, E hidden

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from export_scripts.families.layout.architecture import EncoderArchitecture
from inference.model.encoder import Encoder
from inference.model.ragged import RaggedRows, padded_rows, ragged_rows
from inference.parallel.pipeline import run_stage
from inference.ranks.base import RankBase, StepResult
from inference.ranks.device import has_row_kernels, layer_parameters
from inference.ranks.plan import StepPlan
from inference.ranks.settings import RankSettings

if TYPE_CHECKING:
    from inference.model.gpu.encoder_graph import EncoderGraphs


class EncoderRank(RankBase):
    """A rank that holds a part of a BERT-like encoder."""

    def __init__(self, settings: RankSettings) -> None:
        """Load this rank's part of the model.

        Raises:
            CheckpointMismatchError: The folder is not exactly what its config.ini describes.
            ValueError: The model does not divide among the ranks.
        """
        super().__init__(settings)
        self._remove_padding = settings.remove_padding
        weights, architecture = self.open_weights(settings)
        assert isinstance(architecture, EncoderArchitecture)
        self.architecture = architecture
        self.model = Encoder(weights, architecture, reduce=self.all_reduce)
        self._tiled = has_row_kernels(self.device, weights.dtype)
        self._graphs: EncoderGraphs | None = None

    def prepare(self) -> None:
        """Record the graphs."""
        if not self._tiled or self.layout.pp_size > 1:
            return
        from inference.model.gpu.encoder_graph import EncoderGraphs

        choice = self.architecture
        heads = (choice.head_num, choice.head_num, choice.size_per_head)
        layer = layer_parameters(choice.hidden, heads, choice.inter_size)
        with torch.inference_mode():
            self._graphs = EncoderGraphs(
                self.model.run_layers,
                self.model.empty_hidden,
                parameters=choice.num_layer * layer // self.layout.tp_size,
                device=self.device,
            )
            self._graphs.record()

    def close(self) -> None:
        """Close the connection to the other ranks."""
        self._graphs = None  # they contain sums over the connection
        super().close()

    def run(self, plan: StepPlan, embeddings: torch.Tensor | None = None) -> StepResult | None:
        """Run one step; rank 0 gets the hidden states of all rows' tokens.

        Args:
            plan: Its encoder rows are run.
            embeddings: Their inputs (N, E) fp32 on rank 0; the others need none.
        """
        with torch.inference_mode():
            lengths = [row.count for row in plan.encoder_rows]
            if self._remove_padding:
                rows = ragged_rows(lengths, self.device, tiled=self._tiled)
            else:
                rows = padded_rows(lengths, self.device, tiled=self._tiled)
            tokens = sum(rows.counts)
            batch = _Batch(rows, self._laid_out(embeddings, rows), tokens)
            output = self._recorded(batch)
            if output is None:
                stage = _Stage(self.model)
                hidden = run_stage(stage, [batch], layout=self.layout, groups=self._groups)
                output = hidden[0] if hidden else None
            output = self._first_rank_copy(output, self.model.empty_hidden(tokens))
            if output is None:
                return None
            return StepResult(torch.empty(0, 0), hidden=_true_tokens(output, rows))

    def _recorded(self, batch: _Batch) -> torch.Tensor | None:
        """Return what a graph computes, None where none serves the rows."""
        if self._graphs is None or batch.inputs is None:
            return None
        return self._graphs.run(batch.inputs, batch.rows)

    def _laid_out(self, inputs: torch.Tensor | None, rows: RaggedRows) -> torch.Tensor | None:
        """Return the first layer's input, with zeros for padding; None but on the first stage."""
        inputs = self._share(inputs, sum(rows.lengths), self.architecture.hidden)
        if not self.layout.is_first_stage:
            return None
        assert inputs is not None
        x = inputs.to(self.model.dtype)
        if rows.counts == rows.lengths:
            return x
        out = x.new_zeros(sum(rows.counts), x.shape[1])
        first = 0
        for start, length in zip(rows.starts, rows.lengths, strict=True):
            out[start : start + length] = x[first : first + length]
            first += length
        return out


def _true_tokens(x: torch.Tensor, rows: RaggedRows) -> torch.Tensor:
    """Return the tokens without padding, (N, E)."""
    if rows.counts == rows.lengths:
        return x
    places = zip(rows.starts, rows.lengths, strict=True)
    return torch.cat([x[start : start + length] for start, length in places])


@dataclass(frozen=True)
class _Batch:
    rows: RaggedRows
    inputs: torch.Tensor | None
    tokens: int


@dataclass(frozen=True)
class _Stage:
    """This stage's layers, as the pipeline runs them."""

    model: Encoder

    def embed(self, step: _Batch) -> torch.Tensor:
        assert step.inputs is not None
        return step.inputs

    def empty_hidden(self, step: _Batch) -> torch.Tensor:
        return self.model.empty_hidden(step.tokens)

    def run_layers(self, x: torch.Tensor, step: _Batch) -> torch.Tensor:
        return self.model.run_layers(x, step.rows)
