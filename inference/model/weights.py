"""One rank's tensors from FT files, and the layer parts that all models share."""

# Shapes: E hidden, V vocabulary

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from export_scripts.families.layout.architecture import (
    Architecture,
    DecoderArchitecture,
    EncoderDecoderArchitecture,
    Norm,
)
from export_scripts.ft.reader import FTReader
from foundations.errors import CheckpointMismatchError
from inference.model.layers import Embedding, Normalise, make_norm
from inference.parallel.epilogue import PLAIN_GEMM, GemmActivation, GemmOptions, gemm_activation
from inference.parallel.gemm import Gemm, Product, make_gated_gemm, make_gemm
from inference.parallel.int8 import FP8_GROUP, ScaledWeight, Weight, combine
from inference.parallel.layout import ParallelLayout
from inference.parallel.linear import AllReduce, VocabParallelHead, make_row_gemm

# On a GPU, vocabulary tables are padded to a multiple of this, for aligned rows of outputs. cuBLAS
# on an H200 multiplies 256 rows of 2048 to 50,257 outputs in 540 us, to 50,272 in 82 us.
_TABLE_ROWS = 16


class RankWeights:
    """Reads one rank's tensors from a folder that `FTReader` has validated.

    Tensors with values that are not finite are collected, so that one error names them all. It also
    carries the options of products: `reduce` sums over the ranks of the stage (None for a single
    rank), and `gemm` is the form of all matrices, including the head.
    """

    def __init__(
        self,
        reader: FTReader,
        layout: ParallelLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        matrix_dtype: torch.dtype | None = None,
        reduce: AllReduce | None = None,
        gemm: GemmOptions = PLAIN_GEMM,
    ) -> None:
        """Bind the folder to a rank that computes in `dtype`.

        `matrix_dtype` is the type of matrices in memory; None for `dtype`.

        Raises:
            CheckpointMismatchError: The folder was split for another number of ranks.
        """
        if reader.tp_size != layout.tp_size:
            raise CheckpointMismatchError(
                f"{reader.path} is split for tensor_para_size={reader.tp_size}, but "
                f"{layout.tp_size} ranks are to load it; convert for {layout.tp_size} or set "
                f"tensor_para_size={reader.tp_size}"
            )
        self.reader = reader
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.reduce, self.gemm = reduce, gemm
        self._matrix_dtype = matrix_dtype or dtype
        self._unusable: list[str] = []
        self._tables: dict[tuple[str, range, torch.dtype], Tensor] = {}

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of a tensor, by default in the type of computation."""
        return self._checked(name, self.reader.read(name, self.layout.tp_rank), dtype or self.dtype)

    def optional(self, name: str) -> Tensor | None:
        """Return this rank's part of a tensor, None if the model does not have it."""
        return self.tensor(name) if self.reader.has(name) else None

    def matrix(self, name: str, *, in_fp8: bool = False) -> Weight:
        """Return a weight as (in, out), with the axes after the first flattened.

        With `in_fp8`, a weight stored in FP8 is not converted.
        """
        found = self.reader.in_fp8(name, self.layout.tp_rank) if in_fp8 else None
        if found is not None:
            values = found[0].to(self.device)
            self._checked(name, values.half(), torch.float16)
            scale = self._checked(f"{name}_scale", found[1], torch.float32)
            group = self.reader.group_inputs(values, scale)
            return ScaledWeight(values, scale, group, self._matrix_dtype)
        part = self.reader.read(name, self.layout.tp_rank)
        return self._checked(name, part, self._matrix_dtype).flatten(1)

    def rows(self, name: str, rows: range, *, is_matrix: bool = False) -> Tensor:
        """Return rows of an undivided table or vector, in the type of computation.

        With `is_matrix` (for the head) it has the type of matrices, and on a GPU it is padded with
        zeros to a multiple of 16 rows.
        """
        # A tied table is requested for the embedding and the head; a GPU holds it once.
        dtype = self._matrix_dtype if is_matrix else self.dtype
        key = (name, rows, dtype)
        if key not in self._tables:
            part = self.reader.read(name, 0)[rows.start : rows.stop]
            part = self._checked(name, part, dtype)
            more = -len(part) % _TABLE_ROWS if self.device.type == "cuda" else 0
            self._tables[key] = torch.cat((part, part.new_zeros(more, *part.shape[1:])))
        return self._tables[key] if is_matrix else self._tables[key][: len(rows)]

    def check(self) -> None:
        """Check that all tensors read so far are finite.

        Raises:
            CheckpointMismatchError: With the name of every tensor that is not.
        """
        if self._unusable:
            raise CheckpointMismatchError(
                f"{self.reader.path}: {name} holds values that are not finite; convert the "
                "checkpoint again"
                for name in self._unusable
            )

    def _checked(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        # The sum detects NaN and infinities in one pass over values that are read anyway.
        values = values.to(self.device)
        total = values.sum(dtype=torch.float32)
        if not torch.isfinite(total) and not torch.isfinite(values).all():
            self._unusable.append(name)
        return values.to(dtype)


def check_architecture(architecture: Architecture, tp_size: int) -> None:
    """Check that `tp_size` ranks can compute a model.

    Raises:
        ValueError: With every problem found.
    """
    keys: dict[str, str] = {}  # of config.ini, where the names differ
    if isinstance(architecture, EncoderDecoderArchitecture):
        keys = {"head_num": "num_heads", "inter_size": "d_ff"}
    names = ("head_num", "kv_head_num", "inter_size", "adapter_inter_size")
    sizes = {keys.get(name, name): getattr(architecture, name, 0) for name in names}
    problems = [
        f"tensor_para_size={tp_size} does not divide {name}={size}"
        for name, size in sizes.items()
        if size % tp_size
    ]
    if isinstance(architecture, DecoderArchitecture):
        defaults = {field.name: field.default for field in fields(architecture)}
        special = ("adapter_inter_size", "has_input_norms", "has_output_norms", "residual_scale")
        used = [name for name in special if getattr(architecture, name) != defaults[name]]
        if used and (
            not architecture.norm_before
            or architecture.residual_from_norm
            or architecture.residual != "sequential"
        ):
            problems.append(f"{', '.join(used)}: supported with layernorm_type=pre_layernorm only")
        if not (architecture.has_input_norms or architecture.has_output_norms):
            problems.append(
                "has_input_norms or has_output_norms must be set: a layer needs one of these norms"
            )
    if problems:
        raise ValueError("\n".join(problems))


class LayerLoader:
    """Builds the parts of layers from one rank's tensors."""

    architecture: Any  # of the model that a subclass builds

    def __init__(self, weights: RankWeights, architecture: Architecture) -> None:
        """Check the architecture, see `check_architecture`."""
        check_architecture(architecture, weights.layout.tp_size)
        self.weights = weights
        self.architecture = architecture
        self.reduce, gemm = weights.reduce, weights.gemm
        # Matrices of an FP8 folder are used as stored if their groups fit the kernels, and widened
        # otherwise. Tables, and rows multiplied with grouped scales, are not rounded.
        group = weights.reader.fp8_group
        self._in_fp8 = gemm.fp8 and group is not None and group % FP8_GROUP == 0
        self.gemm = replace(gemm, fp8=gemm.fp8 and not group)
        self._head_gemm = replace(gemm, fp8=gemm.fp8 and group is None)
        self._one_plus: bool = getattr(architecture, "norm_one_plus", False)

    def local(self, number: int, num_layer: int) -> int:
        """Return the index in this stage of the layer with a global number, in its stack."""
        return number - self.weights.layout.layers(num_layer).start

    def norm(self, name: str, *, kind: Norm | None = None, rounds: bool = False) -> Normalise:
        """Return a norm, by default of the model's kind; with `rounds`, only products read it."""
        weight = self.scale(name) if self._one_plus else self.weights.tensor(f"{name}.weight")
        bias = self.weights.optional(f"{name}.bias")
        bias = None if bias is None else bias.to(weight.dtype)
        own: Norm = getattr(self.architecture, "norm", "layernorm")
        eps = self.architecture.layernorm_eps
        rounds = rounds and self.gemm.fp8 and not self.gemm.batch_invariant
        return make_norm(kind or own, weight, bias, eps=eps, rounds=rounds)

    def scale(self, name: str) -> Tensor:
        """Return a norm's scale in fp32."""
        weight = self.weights.tensor(f"{name}.weight", torch.float32)
        # In 16 bits the sum with 1 would round the stored value away.
        return weight + 1 if self._one_plus else weight

    def column(
        self, *names: str, activation: GemmActivation | None = None, rounds: bool = False
    ) -> Product:
        """Return column-parallel linears as one product, with concatenated outputs."""
        matrices = [self._matrix(name) for name in names]
        biases = [self.weights.optional(f"{name}.bias") for name in names]
        present = [bias.flatten() for bias in biases if bias is not None]
        return make_gemm(
            matrices[0]
            if len(matrices) == 1
            else combine(matrices, lambda each: torch.cat(each, dim=1)),
            torch.cat(present) if present else None,
            activation=activation,
            rounds=rounds,
            options=self.gemm,
        )

    def up(self, gate: str, linear: str | None = None, *, rounds: bool = False) -> Product:
        """Return an MLP's linear with its activation, in a gated MLP times the output of `linear`.

        With `rounds`, only another product reads the result.
        """
        arch, weights = self.architecture, self.weights
        activation = gemm_activation(arch.activation, exact_gelu=arch.exact_gelu)
        if linear is None:
            return self.column(gate, activation=activation, rounds=rounds)
        return make_gated_gemm(
            (self._matrix(gate), self._matrix(linear)),
            (weights.optional(f"{gate}.bias"), weights.optional(f"{linear}.bias")),
            activation=activation,
            rounds=rounds,
            options=self.gemm,
        )

    def _matrix(self, name: str) -> Weight:
        return self.weights.matrix(f"{name}.weight", in_fp8=self._in_fp8)

    def row(self, name: str) -> Gemm:
        """Return a row-parallel linear with its own bias and all-reduce."""
        return self.row_with(name, self.weights.optional(f"{name}.bias"), self.reduce)

    def row_with(self, name: str, bias: Tensor | None, reduce: AllReduce | None) -> Gemm:
        """Return a row-parallel linear with the given bias and all-reduce."""
        weight = self._matrix(name)
        return make_row_gemm(weight, bias, reduce=reduce, options=self.gemm)

    def input_side(
        self, tokens: str, positions: str | None, vocab_size: int, **more: Any
    ) -> Embedding:
        """Return the embedding with the tables `tokens` (V, E) and `positions`.

        `more` are further arguments of `Embedding`.
        """
        weights = self.weights
        names = [
            f"model.prompt_table.{each.task_name}.weight" for each in weights.reader.config.tasks
        ]
        prompts = [weights.tensor(name) for name in names if weights.reader.has(name)]
        if weights.device.type == "cpu":
            # The table stays memory-mapped, shared by the ranks of a node.
            table, first_row, reduce = weights.reader.read(tokens, 0), 0, None
        else:
            rows = weights.layout.vocab_rows(vocab_size)
            table, first_row, reduce = weights.rows(tokens, rows), rows.start, self.reduce
        return Embedding(
            table,
            vocab_size,
            weights.dtype,
            first_row,
            reduce,
            prompts=torch.cat(prompts) if prompts else None,
            positions=weights.tensor(positions) if positions else None,
            **more,
        )

    def vocab_head(
        self, name: str, bias: str | None, vocab_size: int, **more: Any
    ) -> VocabParallelHead:
        """Return the linear from hidden states to logits, with the table `name` (V, E).

        `more` are further arguments of `VocabParallelHead`.
        """
        weights, layout = self.weights, self.weights.layout
        rows = layout.vocab_rows(vocab_size)
        table, added, gemm = weights.rows(name, rows, is_matrix=True), None, None
        if bias is not None:
            added = functional.pad(weights.rows(bias, rows), (0, len(table) - len(rows)))
        if rows:
            gemm = make_gemm(table.t(), added, options=self._head_gemm)
        width = layout.vocab_rows_per_rank(vocab_size)
        return VocabParallelHead(gemm, len(rows), width, **more)
