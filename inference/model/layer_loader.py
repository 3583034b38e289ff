"""Loader of the parts that all models share: norms, linears, embedding and head."""

# Shapes: E hidden, V vocabulary

from __future__ import annotations

import torch

from export_scripts.families.layout.architecture import Architecture, Norm
from inference.model.layers import Normalise, make_norm
from inference.model.weights import RankWeights
from inference.parallel.epilogue import GemmActivation, gemm_activation
from inference.parallel.gemm import Product, make_gated_gemm, make_gemm
from inference.parallel.gemm_options import PLAIN_GEMM, GemmOptions
from inference.parallel.linear import (
    AllReduce,
    RowParallelLinear,
    VocabEmbedding,
    VocabParallelHead,
)


class LayerLoader:
    """Makes the parts of layers from one rank's tensors.

    `reduce` sums over the ranks of the stage, None for a single one; `gemm` goes for all matrices,
    the head's too.
    """

    def __init__(
        self,
        weights: RankWeights,
        architecture: Architecture,
        reduce: AllReduce | None,
        gemm: GemmOptions = PLAIN_GEMM,
        *,
        norm: Norm = "layernorm",
        norm_one_plus: bool = False,
    ) -> None:
        self.weights = weights
        self.reduce = reduce
        self.gemm = gemm
        self.activation = gemm_activation(
            architecture.activation, exact_gelu=architecture.exact_gelu
        )
        self._norm_kind, self._one_plus = norm, norm_one_plus
        self._norm_eps = architecture.norm_eps

    def norm(self, name: str, *, kind: Norm | None = None) -> Normalise:
        """Return a norm, by default of the model's kind."""
        weight, bias = self.weights.tensor(f"{name}.weight"), self.weights.optional(f"{name}.bias")
        if self._one_plus:
            weight = self.scale(name)
            bias = None if bias is None else bias.float()
        return make_norm(kind or self._norm_kind, weight, bias, eps=self._norm_eps)

    def scale(self, name: str) -> torch.Tensor:
        """Return a norm's scale in fp32."""
        weight = self.weights.tensor(f"{name}.weight", torch.float32)
        # Rounded to 16 bits, a sum with 1 would lose what is stored.
        return weight + 1 if self._one_plus else weight

    def column(self, *names: str, activation: GemmActivation | None = None) -> Product:
        """Return column-parallel linears as one, their outputs side by side."""
        matrices = [self.weights.matrix(f"{name}.weight") for name in names]
        biases = [self.weights.optional(f"{name}.bias") for name in names]
        present = [bias.flatten() for bias in biases if bias is not None]
        return make_gemm(
            torch.cat(matrices, dim=1) if len(matrices) > 1 else matrices[0],
            torch.cat(present) if present else None,
            activation=activation,
            options=self.gemm,
        )

    def up(self, gate: str, linear: str | None = None) -> Product:
        """Return the activated linear of an MLP; of a gated one times its second, `linear`."""
        if linear is None:
            return self.column(gate, activation=self.activation)
        weights = self.weights
        return make_gated_gemm(
            (weights.matrix(f"{gate}.weight"), weights.matrix(f"{linear}.weight")),
            (weights.optional(f"{gate}.bias"), weights.optional(f"{linear}.bias")),
            activation=self.activation,
            options=self.gemm,
        )

    def row(self, name: str) -> RowParallelLinear:
        """Return a row-parallel linear with its own bias and all-reduce."""
        return self.row_with(name, self.weights.optional(f"{name}.bias"), self.reduce)

    def row_with(
        self, name: str, bias: torch.Tensor | None, reduce: AllReduce | None
    ) -> RowParallelLinear:
        """Return a row-parallel linear with the given bias and all-reduce."""
        weight = self.weights.matrix(f"{name}.weight")
        return RowParallelLinear(weight, bias, reduce=reduce, options=self.gemm)

    def tokens(self, name: str, vocab_size: int) -> VocabEmbedding:
        """Return the embedding of tokens by the table `name` (V, E)."""
        weights = self.weights
        if weights.device.type == "cpu":
            # The mapped table costs no memory of its own and is shared by the ranks of a node.
            return VocabEmbedding(weights.mapped(name))
        rows = weights.layout.vocab_rows(vocab_size)
        table = weights.rows(name, rows)
        return VocabEmbedding(table, first_row=rows.start, reduce=self.reduce)

    def prompts(self) -> torch.Tensor | None:
        """Return all prompt tables, one after the other (rows, E), None without any."""
        names = [
            f"model.prompt_table.{task.task_name}.weight"
            for task in self.weights.reader.config.tasks
        ]
        tables = [self.weights.tensor(name) for name in names if self.weights.has(name)]
        return torch.cat(tables) if tables else None

    def vocab_head(
        self,
        name: str,
        bias: str | None,
        vocab_size: int,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> VocabParallelHead:
        """Return the linear from hidden states to logits by the table `name` (V, E).

        `scale` and `softcap` act on the logits, see `VocabParallelHead`.
        """
        weights, layout = self.weights, self.weights.layout
        rows = layout.vocab_rows(vocab_size)
        return VocabParallelHead(
            weights.matrix_rows(name, rows),
            weights.rows(bias, rows) if bias is not None else None,
            rows=len(rows),
            width=layout.vocab_rows_per_rank(vocab_size),
            scale=scale,
            softcap=softcap,
            options=self.gemm,
        )
