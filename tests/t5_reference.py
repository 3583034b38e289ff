"""A T5 computed plainly from whole tensors: what NeMo's own modules do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tests.tiny_t5 import PLAIN, ROOT, TinyT5

EPS = 1e-6  # what FasterTransformer and a configuration that says nothing take


@dataclass(frozen=True)
class Reference:
    """Computes logits from whole tensors, without caches, ranks or fused kernels."""

    tensors: Mapping[str, torch.Tensor]
    model: TinyT5 = PLAIN
    scalers: Mapping[str, torch.Tensor] | None = None
    adapters: Mapping[str, torch.Tensor] | None = None

    def encode(self, ids: Sequence[int], tables: torch.Tensor | None = None) -> torch.Tensor:
        """Return (tokens, hidden); ids beyond the vocabulary name rows of `tables`."""
        table = self.tensors[ROOT + "encoder_embedding.word_embeddings.weight"]
        table = table if tables is None else torch.cat((table, tables))
        x = self._with_positions(table[list(ids)])
        for layer in range(self.model.encoder_layers):
            x = self._self_attention(x, "encoder", layer)
            x = self._mlp(x, "encoder", layer, "post_attention_layernorm")
        return self._norm(x, f"{ROOT}enc_dec_model.encoder.model.final_layernorm")

    def logits(self, encoded: torch.Tensor, decoder_ids: Sequence[int]) -> torch.Tensor:
        """Return (decoder tokens, vocabulary)."""
        table = self.tensors[ROOT + "encoder_embedding.word_embeddings.weight"]
        x = self._with_positions(table[list(decoder_ids)])
        for layer in range(self.model.decoder_layers):
            x = self._self_attention(x, "decoder", layer)
            x = self._cross_attention(x, encoded, layer)
            x = self._mlp(x, "decoder", layer, "post_inter_attention_layernorm")
        x = self._norm(x, f"{ROOT}enc_dec_model.decoder.model.final_layernorm")
        logits = x @ self.tensors.get(ROOT + "tokens_head.weight", table).T
        bias = self.tensors.get(ROOT + "tokens_head.bias")
        return logits if bias is None else logits + bias

    def _with_positions(self, x: torch.Tensor) -> torch.Tensor:
        table = self.tensors.get(ROOT + "encoder_embedding.position_embeddings.weight")
        return x if table is None else x + table[: len(x)]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.tensors[f"{name}.weight"]
        if self.model.normalization == "rmsnorm":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
        if self.model.normalization == "layernorm1p":
            weight = weight + 1
        return functional.layer_norm(x, x.shape[-1:], weight, self.tensors[f"{name}.bias"], EPS)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(
            x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
        )

    def _scaled(self, x: torch.Tensor, side: str, layer: int, kind: str) -> torch.Tensor:
        return x if self.scalers is None else x * self.scalers[f"{side}.{layer}.{kind}"]

    def _adapted(self, y: torch.Tensor, side: str, layer: int, number: int) -> torch.Tensor:
        if self.adapters is None:
            return y
        norm, shift, down, up = (
            self.adapters[f"{side}.{layer}.{number}.module.{name}"]
            for name in ("0.weight", "0.bias", "1.weight", "3.weight")
        )
        return (
            y
            + functional.silu(functional.layer_norm(y, y.shape[-1:], norm, shift, EPS) @ down.T)
            @ up.T
        )

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.model.head_num, self.model.head_size).transpose(0, 1)

    def _mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = self._heads(q), self._heads(k), self._heads(v)
        scores = q @ k.transpose(1, 2)
        if self.model.normalised_scores:
            scores = scores / math.sqrt(self.model.head_size)
        return ((scores + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)

    def _self_attention(self, x: torch.Tensor, side: str, layer: int) -> torch.Tensor:
        name = f"{ROOT}enc_dec_model.{side}.model.layers.{layer}."
        h = self._norm(x, name + "input_layernorm")
        fused = self._linear(h, name + "self_attention.query_key_value")
        parts = fused.view(len(x), self.model.head_num, 3, self.model.head_size).unbind(2)
        q, k, v = (part.flatten(1) for part in parts)
        k, v = self._scaled(k, side, layer, "key"), self._scaled(v, side, layer, "value")
        y = self._mix(q, k, v, self._bias(len(x), side))
        y = self._linear(y, name + "self_attention.dense")
        return x + self._adapted(y, side, layer, 1)

    def _cross_attention(self, x: torch.Tensor, encoded: torch.Tensor, layer: int) -> torch.Tensor:
        name = f"{ROOT}enc_dec_model.decoder.model.layers.{layer}."
        q = self._linear(
            self._norm(x, name + "post_attention_layernorm"), name + "inter_attention.query"
        )
        both = self._linear(encoded, name + "inter_attention.key_value")
        parts = both.view(len(encoded), self.model.head_num, 2, self.model.head_size).unbind(2)
        k, v = (part.flatten(1) for part in parts)
        k = self._scaled(k, "decoder", layer, "inter_key")
        v = self._scaled(v, "decoder", layer, "inter_value")
        return x + self._linear(self._mix(q, k, v, torch.zeros(1)), name + "inter_attention.dense")

    def _mlp(self, x: torch.Tensor, side: str, layer: int, norm: str) -> torch.Tensor:
        name = f"{ROOT}enc_dec_model.{side}.model.layers.{layer}."
        h = self._norm(x, name + norm)
        inner = self._linear(h, name + "mlp.dense_h_to_4h")
        kind = self.model.activation
        if kind in ("gelu", "geglu"):
            tanh = self.model.fused_activation or self.model.openai_gelu
            inner = functional.gelu(inner, approximate="tanh" if tanh else "none")
        else:
            inner = functional.silu(inner) if kind == "swiglu" else functional.relu(inner)
        if self.model.gated:
            inner = inner * self._linear(h, name + "mlp.dense_h_to_4h_2")
        inner = self._scaled(inner, side, layer, "mlp")
        return x + self._adapted(self._linear(inner, name + "mlp.dense_4h_to_h"), side, layer, 2)

    def _bias(self, width: int, side: str) -> torch.Tensor:
        """Return (heads, width, width): position bias, and -inf ahead in the decoder."""
        bias = torch.zeros(self.model.head_num, width, width)
        if self.model.relative:
            name = f"{ROOT}{side}_relative_position_embedding.relative_position_embedding.weight"
            for query in range(width):
                for key in range(width):
                    bucket = bucket_of(
                        key - query, self.model.buckets, bidirectional=side == "encoder"
                    )
                    bias[:, query, key] = self.tensors[name][bucket]
        if side == "decoder":
            bias += torch.full((width, width), -math.inf).triu(1)
        return bias


def bucket_of(offset: int, buckets: int, *, bidirectional: bool, max_distance: int = 128) -> int:
    """Return T5's bucket of one offset (key minus query)."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact)
    return first + min(exact + int(far), buckets - 1)
