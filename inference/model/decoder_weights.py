"""FT files to one rank's part of a decoder-only model, by the choices of its architecture."""

from __future__ import annotations

import torch

from export_scripts.families.architecture import DecoderArchitecture
from inference.model.decoder import Decoder, DecoderLayer, Embedding, Head
from inference.model.layers import MLP, Attention, Normalise, alibi_slopes, make_norm
from inference.model.rotary import RotaryTable
from inference.model.step import AttentionRules
from inference.model.weights import RankWeights
from inference.parallel.gemm import GemmActivation, gemm_activation
from inference.parallel.linear import (
    AllReduce,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabEmbedding,
    VocabParallelHead,
)


def load_decoder(
    weights: RankWeights,
    architecture: DecoderArchitecture,
    *,
    reduce: AllReduce | None,
    int8: bool = False,
) -> Decoder:
    """Load this rank's stage of a model.

    Args:
        weights: This rank's files.
        architecture: The choices.
        reduce: Sums over the ranks of the stage; None for a single rank.
        int8: Whether the layers' matrices are kept in 8 bits.

    Raises:
        ValueError: The sizes do not divide among the ranks, or a choice is not supported.
        CheckpointMismatchError: Tensors hold values that are not finite.
    """
    layout = weights.layout
    check_architecture(architecture, layout.tp_size)
    loader = _Loader(weights, architecture, reduce, int8=int8)
    decoder = Decoder(
        architecture,
        embedding=loader.embedding() if layout.is_first_stage else None,
        layers=[loader.layer(layer) for layer in layout.layers(architecture.num_layer)],
        head=loader.head() if layout.is_last_stage else None,
        rotary=loader.rotary,
        rules=loader.rules(),
        dtype=weights.dtype,
        device=weights.device,
    )
    weights.check()
    return decoder


def check_architecture(architecture: DecoderArchitecture, tp_size: int) -> None:
    """Fail on what this runtime cannot compute.

    Raises:
        ValueError: naming every reason.
    """
    problems = [
        f"tensor_para_size={tp_size} does not divide {name}={value}"
        for name in ("head_num", "kv_head_num", "inter_size", "adapter_inter_size")
        if (value := getattr(architecture, name)) % tp_size
    ]
    if not architecture.norm_before and architecture.residual != "sequential":
        problems.append("layernorm_type=post_layernorm with a parallel residual is not supported")
    if architecture.adapter_inter_size and (
        not architecture.norm_before
        or architecture.residual_from_norm
        or architecture.residual != "sequential"
    ):
        problems.append("adapters are supported with layernorm_type=pre_layernorm only")
    if problems:
        raise ValueError("\n".join(problems))


class _Loader:
    """Builds the parts of a decoder from a rank's files."""

    def __init__(
        self,
        weights: RankWeights,
        architecture: DecoderArchitecture,
        reduce: AllReduce | None,
        *,
        int8: bool,
    ) -> None:
        self.weights = weights
        self.int8 = int8
        self.architecture = architecture
        self.reduce = reduce
        rotary = architecture.rotary
        self.rotary: RotaryTable | None = None
        if rotary is not None:
            self.rotary = RotaryTable(
                rotary,
                interleaved=architecture.position == "rotary_interleaved",
                device=weights.device,
                dtype=weights.dtype,
            )

    def rules(self) -> AttentionRules:
        """Return what restricts attention in every layer."""
        slopes = None
        if self.architecture.position == "alibi":
            layout = self.weights.layout
            heads = self.architecture.head_num // layout.tp_size
            first = layout.tp_rank * heads
            slopes = alibi_slopes(self.architecture.head_num)[first : first + heads]
            slopes = slopes.to(self.weights.device)
        return AttentionRules(slopes, self.architecture.sliding_window)

    def embedding(self) -> Embedding:
        """Return the input side, of the first stage."""
        weights, vocab_size = self.weights, self.architecture.vocab_size
        if weights.device.type == "cpu":
            # The mapped table costs no memory of its own and is shared by the ranks of a node.
            tokens = VocabEmbedding(weights.mapped("model.wte"))
        else:
            rows = weights.layout.vocab_rows(vocab_size)
            table = weights.rows("model.wte", rows)
            tokens = VocabEmbedding(table, first_row=rows.start, reduce=self.reduce)
        prompts = [
            weights.tensor(f"model.prompt_table.{task.task_name}.weight")
            for task in weights.reader.config.tasks
        ]
        learned = self.architecture.position == "learned"
        return Embedding(
            tokens=tokens,
            vocab_size=vocab_size,
            positions=weights.tensor("model.wpe") if learned else None,
            prompts=torch.cat(prompts) if prompts else None,
            norm=self._norm("model.pre_decoder_layernorm")
            if self.architecture.pre_decoder_norm
            else None,
            dtype=weights.dtype,
        )

    def head(self) -> Head:
        """Return the output side, of the last stage."""
        weights, layout = self.weights, self.weights.layout
        rows = layout.vocab_rows(self.architecture.vocab_size)
        name = "model.lm_head.weight" if self.architecture.untied_head else "model.wte"
        table = weights.rows(name, rows)
        bias = weights.rows("model.lm_head.bias", rows) if self.architecture.head_bias else None
        width = layout.vocab_rows_per_rank(self.architecture.vocab_size)
        has_norm = self.architecture.post_decoder_norm
        return Head(
            norm=self._norm("model.final_layernorm") if has_norm else None,
            slice=VocabParallelHead(table, bias, width=width),
        )

    def layer(self, number: int) -> DecoderLayer:
        """Return the layer of global number `number`."""
        choice, prefix = self.architecture, f"model.layers.{number}."
        shared = choice.residual == "parallel_shared"
        parallel = choice.residual != "sequential"
        attention_out, mlp_out = self._output_biases(prefix)
        late = self.reduce is not None and parallel
        biases = [b for b in (attention_out, mlp_out) if b is not None] if late else []
        reduce = None if parallel else self.reduce
        return DecoderLayer(
            architecture=choice,
            attention_norm=self._norm(prefix + "input_layernorm"),
            mlp_norm=None if shared else self._norm(prefix + "post_attention_layernorm"),
            attention=self._attention(
                prefix + "attention.", None if late else attention_out, reduce
            ),
            mlp=self._mlp(prefix + "mlp.", None if late else mlp_out, reduce, gated=choice.gated),
            attention_adapter=self._adapter(prefix + "after_attention_adapter."),
            mlp_adapter=self._adapter(prefix + "after_ffn_adapter."),
            reduce=self.reduce if parallel else None,
            bias=torch.stack(biases).sum(0) if biases else None,
        )

    def _output_biases(self, prefix: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the biases of attention and MLP output, whole."""
        if self.architecture.fused_bias_sum:
            # Stored divided, as each rank of FasterTransformer adds it before the sum.
            share = self.weights.tensor(prefix + "mlp.attention.bias.sum")
            return None, share * self.weights.layout.tp_size
        return (
            self.weights.optional(prefix + "attention.dense.bias"),
            self.weights.optional(prefix + "mlp.dense_4h_to_h.bias"),
        )

    def _norm(self, name: str) -> Normalise:
        weight, bias = self.weights.tensor(f"{name}.weight"), self.weights.optional(f"{name}.bias")
        return make_norm(self.architecture.norm, weight, bias, eps=self.architecture.norm_eps)

    def _attention(
        self, prefix: str, out_bias: torch.Tensor | None, reduce: AllReduce | None
    ) -> Attention:
        tp_size = self.weights.layout.tp_size
        return Attention(
            self._qkv(prefix),
            self._row(prefix + "dense", out_bias, reduce),
            heads=(
                self.architecture.head_num // tp_size,
                self.architecture.kv_head_num // tp_size,
                self.architecture.size_per_head,
            ),
            rotary=self.rotary,
        )

    def _qkv(self, prefix: str) -> ColumnParallelLinear:
        """Return one linear for queries, keys and values, fused on disk or not."""
        names = [prefix + "query_key_value"]
        if self.architecture.separate_qkv:
            names = [prefix + part for part in ("query", "key", "value")]
        weight = torch.cat([self.weights.matrix(f"{name}.weight") for name in names], dim=1)
        biases = [self.weights.optional(f"{name}.bias") for name in names]
        parts = [bias.flatten() for bias in biases if bias is not None]
        bias = torch.cat(parts) if parts else None
        return ColumnParallelLinear(weight, bias, int8=self.int8)

    def _mlp(
        self,
        prefix: str,
        out_bias: torch.Tensor | None,
        reduce: AllReduce | None,
        *,
        gated: bool = False,
    ) -> MLP:
        activation = gemm_activation(
            self.architecture.activation, exact_gelu=self.architecture.exact_gelu
        )
        return MLP(
            self._column(prefix + "dense_h_to_4h", activation),
            self._row(prefix + "dense_4h_to_h", out_bias, reduce),
            linear_up=self._column(prefix + "dense_h_to_4h_2", None) if gated else None,
        )

    def _column(self, name: str, activation: GemmActivation | None) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            self.weights.matrix(f"{name}.weight"),
            self.weights.optional(f"{name}.bias"),
            activation=activation,
            int8=self.int8,
        )

    def _row(
        self, name: str, bias: torch.Tensor | None, reduce: AllReduce | None
    ) -> RowParallelLinear:
        weight = self.weights.matrix(f"{name}.weight")
        return RowParallelLinear(weight, bias, reduce=reduce, int8=self.int8)

    def _adapter(self, prefix: str) -> MLP | None:
        if not self.architecture.adapter_inter_size:
            return None
        out_bias = self.weights.tensor(prefix + "dense_4h_to_h.bias")
        return self._mlp(prefix, out_bias, self.reduce)
