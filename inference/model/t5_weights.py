"""Build the parts of a T5 model from one rank's files."""

# Shapes: E hidden, H local heads, D head size, V vocabulary

from __future__ import annotations

import math

import torch

from export_scripts.families.architecture import EncoderDecoderArchitecture
from inference.model.layers import Normalise, make_norm
from inference.model.relative_position import distance_bias
from inference.model.t5_layers import (
    T5MLP,
    CausalAttention,
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    Heads,
    LinearAdapter,
    RowAttention,
    Scalers,
    T5Embedding,
)
from inference.model.weights import RankWeights
from inference.parallel.gemm import GemmActivation, gemm_activation
from inference.parallel.linear import (
    AllReduce,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabEmbedding,
    VocabParallelHead,
)


def check_architecture(architecture: EncoderDecoderArchitecture, tp_size: int) -> None:
    """Fail on sizes that do not divide among the ranks.

    Raises:
        ValueError: naming all of them.
    """
    stack = architecture.encoder
    sizes = {
        "num_heads": stack.head_num,
        "d_ff": stack.inter_size,
        "adapter_inter_size": architecture.adapter_inter_size,
    }
    problems = [
        f"tensor_para_size={tp_size} does not divide {name}={size}"
        for name, size in sizes.items()
        if size % tp_size
    ]
    if problems:
        raise ValueError("\n".join(problems))


class T5Loader:
    """Makes layers of a rank's tensors.

    `reduce` sums over the ranks of the stage; with `int8` matrices are kept in 8 bits.
    """

    def __init__(
        self,
        weights: RankWeights,
        architecture: EncoderDecoderArchitecture,
        reduce: AllReduce | None,
        *,
        int8: bool,
    ) -> None:
        self._int8 = int8
        self._weights = weights
        self._architecture = architecture
        self._reduce = reduce
        stack = architecture.encoder
        scale = 1 / math.sqrt(stack.size_per_head) if architecture.scale_attention else 1.0
        heads = stack.head_num // weights.layout.tp_size
        self._heads = Heads(heads, stack.size_per_head, scale)

    def embedding(self) -> T5Embedding:
        """Return the input side of both stacks."""
        weights, vocab_size = self._weights, self._architecture.vocab_size
        if weights.device.type == "cpu":
            # The mapped table costs no memory of its own and is shared by the ranks of a node.
            tokens = VocabEmbedding(weights.mapped("shared.weight_T"))
        else:
            rows = weights.layout.vocab_rows(vocab_size)
            table = weights.rows("shared.weight_T", rows)
            tokens = VocabEmbedding(table, first_row=rows.start, reduce=self._reduce)
        prompts = [
            weights.tensor(f"model.prompt_table.{task.task_name}.weight")
            for task in weights.reader.config.tasks
        ]
        absolute = self._architecture.position == "absolute"
        return T5Embedding(
            tokens=tokens,
            vocab_size=vocab_size,
            positions=weights.tensor("shared.ape") if absolute else None,
            prompts=torch.cat(prompts) if prompts else None,
            dtype=weights.dtype,
        )

    def head(self) -> VocabParallelHead:
        """Return the output side; without a head of its own the embedding serves."""
        layout = self._weights.layout
        rows = layout.vocab_rows(self._architecture.vocab_size)
        name = "lm_head.weight" if self._architecture.untied_head else "shared.weight_T"
        bias = self._weights.rows("shared.bias", rows) if self._architecture.bias else None
        width = layout.vocab_rows_per_rank(self._architecture.vocab_size)
        return VocabParallelHead(self._weights.rows(name, rows), bias, width=width)

    def relative_bias(self, side: str) -> torch.Tensor | None:
        """Return the bias by distance of this rank's heads, None with absolute positions."""
        if self._architecture.position != "relative":
            return None
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return distance_bias(
            self._weights.tensor(name),  # (H, buckets)
            max_distance=self._architecture.max_distance,
            bidirectional=side == "encoder",
        )

    def final_norm(self, side: str) -> Normalise:
        """Return the norm after a stack's last layer."""
        return self._norm(f"{side}.final_layer_norm")

    def encoder_layer(self, number: int) -> EncoderLayer:
        """Return the encoder layer of global number `number`."""
        block = f"encoder.block.{number}."
        name = block + "layer.0.SelfAttention"
        return EncoderLayer(
            attention_norm=self._norm(block + "layer.0.layer_norm"),
            attention=RowAttention(
                qkv=self._joined(f"{name}.q", f"{name}.k", f"{name}.v"),
                out=self._row(f"{name}.o"),
                heads=self._heads,
                scalers=self._scalers(name),
            ),
            attention_adapter=self._adapter(block + "after_attention_adapter."),
            mlp_norm=self._norm(block + "layer.1.layer_norm"),
            mlp=self._mlp(block + "layer.1.DenseReluDense"),
            mlp_adapter=self._adapter(block + "after_ffn_adapter."),
        )

    def decoder_layer(self, number: int) -> DecoderLayer:
        """Return the decoder layer of global number `number`."""
        block = f"decoder.block.{number}."
        attention, cross = block + "layer.0.SelfAttention", block + "layer.1.EncDecAttention"
        qkv_bias = self._weights.optional(f"{attention}.qkv.bias")
        return DecoderLayer(
            attention_norm=self._norm(block + "layer.0.layer_norm"),
            attention=CausalAttention(
                qkv=ColumnParallelLinear(
                    self._weights.matrix(f"{attention}.qkv.weight"),
                    None if qkv_bias is None else qkv_bias.flatten(),
                    int8=self._int8,
                ),
                out=self._row(f"{attention}.o"),
                heads=self._heads,
                scalers=self._scalers(attention),
            ),
            attention_adapter=self._adapter(block + "after_attention_adapter."),
            cross_norm=self._norm(block + "layer.1.layer_norm"),
            cross=CrossAttention(
                query=self._joined(f"{cross}.q"),
                key_value=self._joined(f"{cross}.k", f"{cross}.v"),
                out=self._row(f"{cross}.o"),
                heads=self._heads,
                scalers=self._scalers(cross),
            ),
            mlp_norm=self._norm(block + "layer.2.layer_norm"),
            mlp=self._mlp(block + "layer.2.DenseReluDense"),
            mlp_adapter=self._adapter(block + "after_ffn_adapter."),
        )

    def _norm(self, name: str) -> Normalise:
        weight = self._weights.tensor(f"{name}.weight")
        bias = self._weights.optional(f"{name}.bias")
        return make_norm(self._architecture.norm, weight, bias, eps=self._architecture.norm_eps)

    def _joined(self, *names: str) -> ColumnParallelLinear:
        """Return several column-parallel linears as one, their outputs side by side."""
        matrices = [self._weights.matrix(f"{name}.weight") for name in names]
        biases = [self._weights.optional(f"{name}.bias") for name in names]
        present = [bias for bias in biases if bias is not None]
        return ColumnParallelLinear(
            torch.cat(matrices, dim=1),
            torch.cat(present) if present else None,
            int8=self._int8,
        )

    def _column(self, name: str, activation: GemmActivation | None) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self._weights.matrix(f"{name}.weight"),
            self._weights.optional(f"{name}.bias"),
            activation=activation,
            int8=self._int8,
        )

    def _row(self, name: str) -> RowParallelLinear:
        return RowParallelLinear(
            self._weights.matrix(f"{name}.weight"),
            self._weights.optional(f"{name}.bias"),
            reduce=self._reduce,
            int8=self._int8,
        )

    def _mlp(self, name: str) -> T5MLP:
        choice = self._architecture
        activation = gemm_activation(choice.activation, exact_gelu=choice.exact_gelu)
        return T5MLP(
            wi=self._column(f"{name}.wi", activation),
            wi2=self._column(f"{name}.wi2", None) if self._architecture.gated else None,
            wo=self._row(f"{name}.wo"),
            scaler=self._table(name),
        )

    def _adapter(self, prefix: str) -> LinearAdapter | None:
        if not self._architecture.adapter_inter_size:
            return None
        # A LayerNorm and SiLU whatever the model itself has.
        norm = make_norm(
            "layernorm",
            self._weights.tensor(prefix + "layer_norm.weight"),
            self._weights.tensor(prefix + "layer_norm.bias"),
            eps=self._architecture.norm_eps,
        )
        return LinearAdapter(
            norm=norm,
            wi=self._column(prefix + "DenseSiluDense.wi", "silu"),
            wo=self._row(prefix + "DenseSiluDense.wo"),
        )

    def _scalers(self, attention: str) -> Scalers | None:
        key, value = self._table(f"{attention}.k"), self._table(f"{attention}.v")
        if key is None or value is None:
            return None
        shape = (-1, self._heads.count, self._heads.size)
        return Scalers(key.view(shape), value.view(shape))

    def _table(self, name: str) -> torch.Tensor | None:
        """Return an IA3 table with a row of ones for no task, (tasks + 1, width)."""
        if not self._architecture.ia3_num_tasks:
            return None
        table = self._weights.tensor(f"{name}.ia3.weight")
        return torch.cat((table, torch.ones_like(table[:1])))
