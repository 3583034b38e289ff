"""Decoder-only models: GPT, OPT, BLOOM, GPT-J, GPT-NeoX, and today's dense ones.

The architecture record describes their differences. A pipeline stage holds only its own layers, and
only the linears know how tensors are divided among ranks.
"""

# Shapes: N tokens of a step, E hidden

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from export_scripts.families.layout.architecture import DecoderArchitecture
from inference.model.layers import (
    MLP,
    XIELU,
    Attention,
    Embedding,
    Normalise,
    QueryKeyNorm,
    Sublayer,
    Sublayers,
    alibi_slopes,
)
from inference.model.rotary import RotaryTable
from inference.model.stage import GeneratorModel
from inference.model.step import AttentionRules, Step
from inference.model.weights import LayerLoader, RankWeights
from inference.parallel.linear import AllReduce, VocabParallelHead

# Names of the norm before a part, the norm after it, and its adapter.
_ATTENTION_PLACES = ("input_layernorm", "attention_output_layernorm", "after_attention_adapter.")
_MLP_PLACES = ("post_attention_layernorm", "mlp_output_layernorm", "after_ffn_adapter.")


@dataclass(frozen=True)
class ParallelLayer:
    """A layer whose attention and MLP read the same input, and add their sum to it."""

    attention: Attention
    mlp: MLP
    norm: Normalise
    mlp_norm: Normalise | None  # None: `norm` serves both
    reduce: AllReduce | None  # applied once, to the sum
    bias: Tensor | None  # added after the all-reduce

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return (N, E) for x (N, E)."""
        h = self.norm(x)
        inner = h if self.mlp_norm is None else self.mlp_norm(x)
        if self.reduce is None:
            return self.mlp(inner, step, self.attention(h, step, x))
        both = self.mlp(inner, step, self.attention(h, step))
        return self.reduce(both, bias=self.bias, residual=x)


class DecoderLoader(LayerLoader):
    """Builds a decoder's parts from a rank's tensors."""

    architecture: DecoderArchitecture

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Number of query heads and key/value heads of this rank, and the head size."""
        arch, tp_size = self.architecture, self.weights.layout.tp_size
        return arch.head_num // tp_size, arch.kv_head_num // tp_size, arch.size_per_head

    @cached_property
    def tables(self) -> tuple[RotaryTable | None, RotaryTable | None]:
        """The rotary tables of layers without and with a sliding window."""
        arch, weights = self.architecture, self.weights
        interleaved = arch.position == "rotary_interleaved"
        table = partial(RotaryTable, interleaved=interleaved, device=weights.device)
        wide, local = (
            None if rotary is None else table(rotary, dtype=weights.dtype)
            for rotary in (arch.rotary, arch.local_rotary)
        )
        return wide, local or wide

    def rules(self) -> AttentionRules:
        """Return the rules of attention in this stage's layers."""
        arch, layout = self.architecture, self.weights.layout
        slopes = None
        if arch.position == "alibi":
            heads = self._heads[0]
            first = layout.tp_rank * heads
            slopes = alibi_slopes(arch.head_num)[first : first + heads].to(self.weights.device)
        sliding = arch.sliding_layers
        if sliding is not None:
            sliding = tuple(sliding[layer] for layer in layout.layers(arch.num_layer))
        return AttentionRules(
            slopes,
            arch.sliding_window,
            sliding_layers=sliding,
            scale=arch.attention_scale,
            softcap=arch.attention_softcap,
            batch_invariant=self.gemm.batch_invariant,
            group=arch.head_num // arch.kv_head_num,
        )

    def embedding(self) -> Embedding:
        """Return the embedding, for the first stage."""
        arch = self.architecture
        positions = "model.wpe" if arch.position == "learned" else None
        norm = "model.pre_decoder_layernorm"
        return self.input_side(
            *("model.wte", positions, arch.vocab_size),
            norm=self.norm(norm) if arch.has_pre_decoder_layernorm else None,
            scale=float(torch.tensor(arch.embedding_scale, dtype=self.weights.dtype)),
        )

    def head(self) -> VocabParallelHead:
        """Return the head, for the last stage."""
        arch = self.architecture
        table = "model.lm_head.weight" if arch.untied_head else "model.wte"
        bias = "model.lm_head.bias" if arch.head_bias else None
        norm = self.norm("model.final_layernorm") if arch.has_post_decoder_layernorm else None
        scale, softcap = arch.logit_scale, arch.logit_softcap
        return self.vocab_head(
            table, bias, arch.vocab_size, norm=norm, scale=scale, softcap=softcap
        )

    def layer(self, number: int) -> ParallelLayer | Sublayers:
        """Return the layer of global number `number`."""
        arch, prefix = self.architecture, f"model.layers.{number}."
        parallel = arch.residual != "sequential"
        attention_out, mlp_out = self._output_biases(prefix)
        late = self.reduce is not None and parallel
        biases = [b for b in (attention_out, mlp_out) if b is not None] if late else []
        reduce = None if parallel else self.reduce
        attention = self._attention(number, None if late else attention_out, reduce)
        mlp = self._mlp(prefix + "mlp.", None if late else mlp_out, reduce, gated=arch.gated)
        if not parallel:
            return Sublayers(
                (
                    self._sublayer(attention, prefix, _ATTENTION_PLACES),
                    self._sublayer(mlp, prefix, _MLP_PLACES),
                )
            )
        shared = arch.residual == "parallel_shared"
        return ParallelLayer(
            attention,
            mlp,
            self.norm(prefix + _ATTENTION_PLACES[0], rounds=True),
            None if shared else self.norm(prefix + _MLP_PLACES[0], rounds=True),
            reduce=self.reduce,
            bias=torch.stack(biases).sum(0) if biases else None,
        )

    def _sublayer(self, part: Any, prefix: str, places: tuple[str, str, str]) -> Sublayer:
        before, after, adapter = (prefix + place for place in places)
        arch, norm = self.architecture, None
        if arch.has_input_norms:
            rounds = arch.norm_before and not arch.residual_from_norm
            norm = self.norm(before, rounds=rounds)
        return Sublayer(
            part,
            norm if arch.norm_before else None,
            self.norm(after) if arch.has_output_norms else None,
            self._adapter(adapter) if arch.adapter_inter_size else None,
            arch.residual_scale,
            sum_norm=None if arch.norm_before else norm,
            residual_from_norm=arch.residual_from_norm,
        )

    def _output_biases(self, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the undivided biases of attention and MLP output."""
        if self.architecture.fused_bias_sum:
            # Stored divided by the TP size: FasterTransformer's ranks add it before the all-reduce.
            share = self.weights.tensor(prefix + "mlp.attention.bias.sum")
            return None, share * self.weights.layout.tp_size
        return (
            self.weights.optional(prefix + "attention.dense.bias"),
            self.weights.optional(prefix + "mlp.dense_4h_to_h.bias"),
        )

    def _attention(
        self, number: int, out_bias: Tensor | None, reduce: AllReduce | None
    ) -> Attention:
        prefix = f"model.layers.{number}.attention."
        # One linear for queries, keys and values, fused on disk or not.
        names = ["query_key_value"]
        if self.architecture.separate_qkv:
            names = ["query", "key", "value"]
        return Attention(
            self.column(*(prefix + name for name in names)),
            self.row_with(prefix + "dense", out_bias, reduce),
            heads=self._heads,
            layer=self.local(number, self.architecture.num_layer),
            rotary=self._rotary_of(number),
            norm=self._query_key_norm(prefix),
        )

    def _rotary_of(self, layer: int) -> RotaryTable | None:
        arch = self.architecture
        if arch.rotary_layers is not None and not arch.rotary_layers[layer]:
            return None
        slides = arch.sliding_layers is None or arch.sliding_layers[layer]
        return self.tables[bool(slides and arch.sliding_window)]

    def _query_key_norm(self, prefix: str) -> QueryKeyNorm | None:
        arch = self.architecture
        if arch.query_key_norm is None:
            return None
        *counts, size = self._heads
        names = [f"{prefix}{name}_norm" for name in ("query", "key")]

        def of_heads(parts: list[Tensor]) -> Tensor:
            # A norm of a single head's size serves all heads.
            pairs = zip(parts, counts, strict=True)
            return torch.cat([part.view(-1, size).expand(count, size) for part, count in pairs])

        biases = [self.weights.optional(f"{name}.bias") for name in names]
        stored = [bias.float() for bias in biases if bias is not None]
        return QueryKeyNorm(
            of_heads([self.scale(name) for name in names]),
            counts=(counts[0], counts[1]),
            eps=arch.layernorm_eps,
            whole=arch.query_key_norm == "all",
            reduce=self.reduce,
            tp_size=self.weights.layout.tp_size,
            centred=arch.norm == "layernorm",
            bias=of_heads(stored) if stored else None,
            rotated=arch.query_key_norm_rotated,
        )

    def _mlp(
        self,
        prefix: str,
        out_bias: Tensor | None,
        reduce: AllReduce | None,
        *,
        gated: bool = False,
    ) -> MLP:
        name, curve = prefix + "dense_h_to_4h", None
        if self.architecture.activation == "xielu":
            # No product kernel can apply it.
            up, curve = self.column(name), self._xielu(prefix + "xielu.")
        else:
            up = self.up(name, name + "_2" if gated else None, rounds=True)
        down = self.row_with(prefix + "dense_4h_to_h", out_bias, reduce)
        return MLP(up, down, activation=curve)

    def _xielu(self, prefix: str) -> XIELU:
        names = ("alpha_p", "alpha_n", "beta", "eps")
        positive, negative, beta, eps = (
            self.weights.tensor(prefix + name, torch.float32) for name in names
        )
        positive, negative = functional.softplus(positive), beta + functional.softplus(negative)
        return XIELU(positive, negative, beta, eps)

    def _adapter(self, prefix: str) -> Sublayer:
        bias = self.weights.tensor(prefix + "dense_4h_to_h.bias")
        return Sublayer(self._mlp(prefix, bias, self.reduce), norm=None)


class Decoder(GeneratorModel):
    """One rank's part of a decoder-only model."""

    architecture: DecoderArchitecture

    def _load(self, weights: RankWeights) -> None:
        layout, architecture = weights.layout, self.architecture
        loader = DecoderLoader(weights, architecture)
        self._embedding = loader.embedding() if layout.is_first_stage else None
        self.layers = [loader.layer(number) for number in layout.layers(architecture.num_layer)]
        self.head = loader.head() if layout.is_last_stage else None
        self._rotary = {table for table in loader.tables if table is not None}
        self.rules = loader.rules()
        self.can_select_rows = architecture.residual == "sequential"

    def run_layers(self, x: Tensor, step: Step) -> Tensor:
        """Return the output of this stage's last layer, (N, E) or with `outputs_only` (n, E)."""
        step = replace(step, angles={table: table(step.positions) for table in self._rotary})
        for layer in self.layers[:-1]:
            x = layer(x, step)
        if step.outputs_only and len(step.output_rows) < len(x):
            # Without outputs the layer only stores keys and values; one row costs little.
            rows = step.output_rows if len(step.output_rows) else step.positions.new_zeros(1)
            step = replace(step, selected=rows, attention=step.attention.of_rows(rows))
        return self.layers[-1](x, step)
