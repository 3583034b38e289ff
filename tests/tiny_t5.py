"""Random small Megatron T5s in NeMo's files, what is tuned on top, and a plain forward pass.

Dimensions all differ, so that a wrong axis cannot pass. Fused rows are ordered [heads][parts][d]
in the whole tensors; `legacy` files have [parts][heads][d] on each rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.tiny import rank_folder, torch_bytes, write_tar

ROOT = "enc_dec_model."
SIDES = ("encoder", "decoder")
EPS = 1e-6  # what FasterTransformer and a configuration that says nothing take

_CUTS = {
    "word_embeddings.weight": 0,
    "tokens_head.weight": 0,
    "tokens_head.bias": 0,
    "query_key_value.weight": 0,
    "query_key_value.bias": 0,
    "inter_attention.query.weight": 0,
    "inter_attention.query.bias": 0,
    "key_value.weight": 0,
    "key_value.bias": 0,
    "attention.dense.weight": 1,
    "dense_h_to_4h.weight": 0,
    "dense_h_to_4h.bias": 0,
    "dense_h_to_4h_2.weight": 0,
    "dense_h_to_4h_2.bias": 0,
    "dense_4h_to_h.weight": 1,
    "scalers": 0,
    "module.1.weight": 0,
    "module.3.weight": 1,
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyT5:
    """Sizes and choices of a T5."""

    head_num: int = 4
    head_size: int = 6
    hidden: int = 20
    inter_size: int = 28
    encoder_layers: int = 2
    decoder_layers: int = 4
    vocab_size: int = 40
    positions: int = 24
    buckets: int = 8
    bias: bool = True
    relative: bool = False
    activation: str = "gelu"
    normalization: str = "layernorm"
    normalised_scores: bool = True
    legacy: bool = False
    own_head: bool = False
    head_bias: bool = True

    @property
    def inner(self) -> int:
        return self.head_num * self.head_size

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    def depth(self, side: str) -> int:
        return self.encoder_layers if side == "encoder" else self.decoder_layers


# Converted Hugging Face models look like this in NeMo.
BARE = TinyT5(bias=False, normalization="rmsnorm", relative=True, head_bias=False)


def t5_tensors(model: TinyT5 = TinyT5(), *, seed: int = 0) -> Tensors:
    """Return a whole T5 in NeMo's names, layers numbered globally on each side."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        ROOT + "encoder_embedding.word_embeddings.weight": (model.vocab_size, model.hidden)
    }
    if model.relative:
        for side in SIDES:
            name = f"{ROOT}{side}_relative_position_embedding.relative_position_embedding.weight"
            shapes[name] = (model.buckets, model.head_num)
    else:
        shapes[ROOT + "encoder_embedding.position_embeddings.weight"] = (
            model.positions,
            model.hidden,
        )
    for side in SIDES:
        for layer in range(model.depth(side)):
            shapes |= _layer_shapes(model, side, layer)
        shapes |= _norm_shapes(model, f"{ROOT}enc_dec_model.{side}.model.final_layernorm")
    if model.own_head:
        shapes[ROOT + "tokens_head.weight"] = (model.vocab_size, model.hidden)
    if model.head_bias:
        shapes[ROOT + "tokens_head.bias"] = (model.vocab_size,)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()
    }
    for name in tensors:
        if "layernorm.weight" in name and model.normalization != "layernorm1p":
            tensors[name] += 1
    return tensors


def _norm_shapes(model: TinyT5, name: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (model.hidden,)}
    if model.normalization != "rmsnorm":
        shapes[f"{name}.bias"] = (model.hidden,)
    return shapes


def _layer_shapes(model: TinyT5, side: str, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"{ROOT}enc_dec_model.{side}.model.layers.{layer}."
    h, a, f = model.hidden, model.inner, model.inter_size
    linears = {
        "self_attention.query_key_value": (3 * a, h),
        "self_attention.dense": (h, a),
        "mlp.dense_h_to_4h": (f, h),
        "mlp.dense_4h_to_h": (h, f),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model.gated:
        linears["mlp.dense_h_to_4h_2"] = (f, h)
    if side == "decoder":
        norms.append("post_inter_attention_layernorm")
        linears |= {
            "inter_attention.query": (a, h),
            "inter_attention.key_value": (2 * a, h),
            "inter_attention.dense": (h, a),
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if model.bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    for name in norms:
        shapes |= _norm_shapes(model, prefix + name)
    return shapes


def t5_config(
    model: TinyT5 = TinyT5(), *, tp: int = 1, pp: int = 1, split: int = 0, nested: bool = True
) -> dict[str, Any]:
    """Return a model_config.yaml, with a section per stack or flat (equal depths only)."""
    common = {
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.inter_size,
        "num_attention_heads": model.head_num,
        "kv_channels": model.head_size,
        "max_position_embeddings": model.positions,
        "position_embedding_type": "relative" if model.relative else "learned_absolute",
        "relative_attention_num_buckets": model.buckets,
        "activation": model.activation,
        "bias": model.bias,
        "normalization": model.normalization,
        "normalize_attention_scores": model.normalised_scores,
        "megatron_legacy": model.legacy,
    }
    sides = {side: common | {"num_layers": model.depth(side)} for side in SIDES}
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_model_parallel_split_rank": split,
        "tokens_head_bias": model.head_bias,
        "tokenizer": {
            "library": "megatron",
            "type": "BertWordPieceCase",
            "model": None,
            "vocab_file": "nemo:0123_vocab.txt",
            "merge_file": None,
        },
        **(sides if nested else sides["encoder"]),
    }


def t5_states(
    tensors: Mapping[str, torch.Tensor],
    model: TinyT5 = TinyT5(),
    *,
    tp: int = 1,
    pp: int = 1,
    split: int = 0,
) -> dict[tuple[int, int], Tensors]:
    """Return what each (tensor rank, stage) of a training run holds, layers numbered per stage."""
    states: dict[tuple[int, int], Tensors] = {(t, p): {} for t in range(tp) for p in range(pp)}
    for name, tensor in tensors.items():
        stage, local = _place(name, model, pp, split)
        axis = next((a for end, a in _CUTS.items() if name.endswith(end)), None)
        parts = [tensor] * tp if axis is None else list(tensor.chunk(tp, axis))
        for t in range(tp):
            part = _legacy(name, parts[t], model) if model.legacy else parts[t]
            states[t, stage][local] = part.contiguous().clone()
    return states


def _legacy(name: str, part: torch.Tensor, model: TinyT5) -> torch.Tensor:
    parts = 3 if "query_key_value" in name else 2 if "key_value" in name else 1
    if parts == 1:
        return part
    return part.view(-1, parts, model.head_size, *part.shape[1:]).transpose(0, 1).flatten(0, 2)


def _place(name: str, model: TinyT5, pp: int, split: int) -> tuple[int, str]:
    side = "decoder" if ".decoder." in name or "tokens_head" in name else "encoder"
    first, stages = (0, split or pp) if side == "encoder" else (split, pp - split)
    before, layers, after = name.partition(".layers.")
    if not layers:
        early = "embedding" in name
        stage = 0 if early and "decoder" not in name else first if early else first + stages - 1
        return stage, name
    digits = len(after) - len(after.lstrip("0123456789"))
    number, rest = int(after[:digits]), after[digits:]
    stage, local = divmod(number, model.depth(side) // stages)
    return first + stage, f"{before}.layers.{local}{rest}"


def write_t5(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    model: TinyT5 = TinyT5(),
    *,
    tp: int = 1,
    pp: int = 1,
    split: int = 0,
    config: Mapping[str, Any] | None = None,
    nested: bool = True,
) -> Path:
    """Write a .nemo archive."""
    settings = t5_config(model, tp=tp, pp=pp, split=split, nested=nested) | dict(config or {})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(model.vocab_size - 4))]
    members = {
        "model_config.yaml": json.dumps(settings).encode(),  # JSON is YAML
        "0123_vocab.txt": "\n".join(words).encode(),
    }
    for (t, p), state in t5_states(tensors, model, tp=tp, pp=pp, split=split).items():
        members[rank_folder(t, p, tp=tp, pp=pp) + "model_weights.ckpt"] = torch_bytes(state)
    return write_tar(path, members)


# --- what is tuned on top -------------------------------------------------------------------

_SUBLAYER = {"key": "self_attention", "value": "self_attention", "mlp": "mlp"}


def ia3_scalers(model: TinyT5 = TinyT5(), *, seed: int = 0) -> Tensors:
    """Return a task's scalers as "<side>.<layer>.<kind>"."""
    generator = torch.Generator().manual_seed(1000 + seed)
    scalers: Tensors = {}
    for side in SIDES:
        kinds = [
            "key",
            "value",
            "mlp",
            *(["inter_key", "inter_value"] if side == "decoder" else []),
        ]
        for layer in range(model.depth(side)):
            for kind in kinds:
                width = model.inter_size if kind == "mlp" else model.inner
                values = 1 + 0.5 * torch.randn(width, generator=generator)
                scalers[f"{side}.{layer}.{kind}"] = values
    return scalers


def write_ia3(
    path: Path,
    scalers: Mapping[str, torch.Tensor],
    model: TinyT5 = TinyT5(),
    *,
    later_names: bool = False,
    tp: int = 1,
    pp: int = 1,
    split: int = 0,
) -> Path:
    """Write an IA3 archive, in the names of older or later NeMo versions."""
    named = {}
    for place, values in scalers.items():
        side, layer, kind = place.split(".")
        part = "inter_attention" if kind.startswith("inter_") else _SUBLAYER[kind]
        adapter = f".{part}:{kind.removeprefix('inter_')}" if later_names else f":{kind}"
        key = f"{ROOT}enc_dec_model.{side}.model.layers.{layer}{adapter}_infused_adapter.scalers"
        named[key] = values
    return _write_tuned(path, named, model, {"type": "ia3"}, tp=tp, pp=pp, split=split)


def adapter_tensors(model: TinyT5 = TinyT5(), *, width: int = 12, seed: int = 0) -> Tensors:
    """Return linear adapters as "<side>.<layer>.<1|2>.module..."."""
    generator = torch.Generator().manual_seed(2000 + seed)
    shapes = {
        "module.0.weight": (model.hidden,),
        "module.0.bias": (model.hidden,),
        "module.1.weight": (width, model.hidden),
        "module.3.weight": (model.hidden, width),
    }
    return {
        f"{side}.{layer}.{number}.{name}": torch.randn(shape, generator=generator) * 0.3
        for side in SIDES
        for layer in range(model.depth(side))
        for number in (1, 2)
        for name, shape in shapes.items()
    }


def write_adapter(
    path: Path,
    adapters: Mapping[str, torch.Tensor],
    model: TinyT5 = TinyT5(),
    *,
    width: int = 12,
    tuning: Mapping[str, Any] | None = None,
    **layout: int,
) -> Path:
    """Write a linear adapter archive."""
    settings = {
        "type": "linear_adapter",
        "adapter_dim": width,
        "norm_position": "pre",
        "norm_type": "mixedfusedlayernorm",
        **(tuning or {}),
    }
    named = {}
    for place, values in adapters.items():
        side, layer, number, rest = place.split(".", 3)
        stem = f"{ROOT}enc_dec_model.{side}.model.layers.{layer}:adapter_{number}"
        named[f"{stem}.{rest}"] = values
    return _write_tuned(path, named, model, settings, **layout)


def _write_tuned(
    path: Path,
    named: Mapping[str, torch.Tensor],
    model: TinyT5,
    tuning: Mapping[str, Any],
    *,
    tp: int = 1,
    pp: int = 1,
    split: int = 0,
) -> Path:
    """Write an archive; the part of a key after the module's name is a key of a nested table."""
    config = {
        "adapter_tuning": dict(tuning),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }
    members = {"model_config.yaml": json.dumps(config).encode()}
    plain = replace(model, legacy=False)
    for (t, p), state in t5_states(named, plain, tp=tp, pp=pp, split=split).items():
        nested: dict[str, Tensors] = {}
        for key, value in state.items():
            colon = key.index(":")
            module, _, rest = key[colon:].partition(".")
            nested.setdefault(key[:colon] + module, {})[rest] = value
        members[rank_folder(t, p, tp=tp, pp=pp) + "model_weights.ckpt"] = torch_bytes(nested)
    return write_tar(path, members)


def write_prompts(path: Path, tables: Mapping[str, torch.Tensor], **data: Any) -> Path:
    """Write a prompt-learning archive."""
    config = {
        "task_templates": [
            {"taskname": name, "total_virtual_tokens": len(table)} for name, table in tables.items()
        ],
        "data": data,
    }
    state = {
        "prompt_table": {
            f"prompt_table.{name}.prompt_embeddings.weight": table for name, table in tables.items()
        }
    }
    members = {
        "model_config.yaml": json.dumps(config).encode(),
        "model_weights.ckpt": torch_bytes(state),
    }
    return write_tar(path, members)


# --- a plain forward pass -------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Computes logits from whole tensors, without caches, ranks or fused kernels."""

    tensors: Mapping[str, torch.Tensor]
    model: TinyT5 = TinyT5()
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
            inner = functional.gelu(inner, approximate="tanh")
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
