"""Loading of one rank's part of a T5 model from FT files."""

# Shapes: E hidden, H local heads, D head size, V vocabulary

from __future__ import annotations

import math

import torch

from export_scripts.families.layout.architecture import EncoderDecoderArchitecture
from inference.model.layer_loader import LayerLoader
from inference.model.layers import MLP, Attention, Embedding, Normalise, RowAttention
from inference.model.relative_position import distance_bias
from inference.model.t5_layers import (
    CrossAttention,
    LinearAdapter,
    T5DecoderLayer,
    T5EncoderLayer,
)
from inference.model.weights import RankWeights
from inference.parallel.epilogue import gemm_activation
from inference.parallel.gemm_options import GemmOptions
from inference.parallel.layout import undivided
from inference.parallel.linear import (
    AllReduce,
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    VocabParallelHead,
)


def check_t5(architecture: EncoderDecoderArchitecture, tp_size: int) -> None:
    """Check that the sizes divide among the ranks.

    Raises:
        ValueError: with every size that does not.
    """
    stack = architecture.encoder
    sizes = {
        "num_heads": stack.head_num,
        "d_ff": stack.inter_size,
        "adapter_inter_size": architecture.adapter_inter_size,
    }
    if problems := undivided(tp_size, sizes):
        raise ValueError("\n".join(problems))


class T5Loader:
    """Builder of a T5 model's layers from a rank's tensors.

    `reduce` sums over the ranks of the stage; `gemm` goes for all matrices.
    """

    def __init__(
        self,
        weights: RankWeights,
        architecture: EncoderDecoderArchitecture,
        reduce: AllReduce | None,
        gemm: GemmOptions,
    ) -> None:
        self._weights = weights
        self._architecture = architecture
        self._parts = LayerLoader(
            weights,
            norm=architecture.norm,
            norm_eps=architecture.norm_eps,
            reduce=reduce,
            gemm=gemm,
        )
        stack = architecture.encoder
        self.scale = 1 / math.sqrt(stack.size_per_head) if architecture.scale_attention else 1.0
        self._heads = stack.head_num // weights.layout.tp_size
        self._size = stack.size_per_head

    def embedding(self) -> Embedding:
        """Return the input side of both stacks."""
        absolute = self._architecture.position == "absolute"
        return Embedding(
            tokens=self._parts.tokens("shared.weight_T", self._architecture.vocab_size),
            vocab_size=self._architecture.vocab_size,
            positions=self._weights.tensor("shared.ape") if absolute else None,
            prompts=self._parts.prompts(),
            dtype=self._weights.dtype,
        )

    def head(self) -> VocabParallelHead:
        """Return the output side; without a head of its own the embedding serves."""
        choice = self._architecture
        table = "lm_head.weight" if choice.untied_head else "shared.weight_T"
        return self._parts.head(table, "shared.bias" if choice.bias else None, choice.vocab_size)

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
        return self._parts.norm(f"{side}.final_layer_norm")

    def encoder_layer(self, number: int) -> T5EncoderLayer:
        """Return the encoder layer of global number `number`."""
        block = f"encoder.block.{number}."
        name = block + "layer.0.SelfAttention"
        return T5EncoderLayer(
            attention_norm=self._parts.norm(block + "layer.0.layer_norm"),
            attention=RowAttention(
                qkv=self._parts.column(f"{name}.q", f"{name}.k", f"{name}.v"),
                out=self._parts.row(f"{name}.o"),
                heads=self._heads,
                scale=self.scale,
                scalers=self._scalers(name),
            ),
            attention_adapter=self._adapter(block + "after_attention_adapter."),
            mlp_norm=self._parts.norm(block + "layer.1.layer_norm"),
            mlp=self._mlp(block + "layer.1.DenseReluDense"),
            mlp_adapter=self._adapter(block + "after_ffn_adapter."),
        )

    def decoder_layer(self, number: int) -> T5DecoderLayer:
        """Return the decoder layer of global number `number`."""
        block = f"decoder.block.{number}."
        attention, cross = block + "layer.0.SelfAttention", block + "layer.1.EncDecAttention"
        return T5DecoderLayer(
            attention_norm=self._parts.norm(block + "layer.0.layer_norm"),
            attention=Attention(
                qkv=self._parts.column(f"{attention}.qkv"),
                out=self._parts.row(f"{attention}.o"),
                heads=(self._heads, self._heads, self._size),
                scalers=self._causal_scalers(attention),
            ),
            attention_adapter=self._adapter(block + "after_attention_adapter."),
            cross_norm=self._parts.norm(block + "layer.1.layer_norm"),
            cross=CrossAttention(
                query=self._parts.column(f"{cross}.q"),
                key_value=self._parts.column(f"{cross}.k", f"{cross}.v"),
                out=self._parts.row(f"{cross}.o"),
                heads=self._heads,
                scalers=self._keys_values(cross),
            ),
            mlp_norm=self._parts.norm(block + "layer.2.layer_norm"),
            mlp=self._mlp(block + "layer.2.DenseReluDense"),
            mlp_adapter=self._adapter(block + "after_ffn_adapter."),
        )

    def _mlp(self, name: str) -> MLP:
        choice = self._architecture
        activation = gemm_activation(choice.activation, exact_gelu=choice.exact_gelu)
        wi: ColumnParallelLinear | GatedColumnParallelLinear
        if choice.gated:
            wi = self._parts.gated_column(f"{name}.wi", f"{name}.wi2", activation=activation)
        else:
            wi = self._parts.column(f"{name}.wi", activation=activation)
        return MLP(wi, self._parts.row(f"{name}.wo"), scalers=self._table(name))

    def _adapter(self, prefix: str) -> LinearAdapter | None:
        if not self._architecture.adapter_inter_size:
            return None
        return LinearAdapter(
            # A LayerNorm and SiLU whatever the model itself has.
            norm=self._parts.norm(prefix + "layer_norm", kind="layernorm"),
            wi=self._parts.column(prefix + "DenseSiluDense.wi", activation="silu"),
            wo=self._parts.row(prefix + "DenseSiluDense.wo"),
        )

    def _scalers(self, attention: str) -> torch.Tensor | None:
        """Return the IA3 tables of an attention, ones for queries, (tasks + 1, 3, H, D)."""
        table = self._keys_values(attention)
        return None if table is None else torch.cat((torch.ones_like(table[:, :1]), table), dim=1)

    def _causal_scalers(self, attention: str) -> torch.Tensor | None:
        """Return the same with the heads side by side, (tasks + 1, 3 * H, D)."""
        table = self._scalers(attention)
        return None if table is None else table.flatten(1, 2)

    def _keys_values(self, attention: str) -> torch.Tensor | None:
        """Return the IA3 tables of keys and values, (tasks + 1, 2, H, D)."""
        key, value = self._table(f"{attention}.k"), self._table(f"{attention}.v")
        if key is None or value is None:
            return None
        return torch.stack((key, value), dim=1).view(-1, 2, self._heads, self._size)

    def _table(self, name: str) -> torch.Tensor | None:
        """Return an IA3 table with a row of ones for no task, (tasks + 1, width)."""
        if not self._architecture.ia3_num_tasks:
            return None
        table = self._weights.tensor(f"{name}.ia3.weight")
        return torch.cat((table, torch.ones_like(table[:1])))
