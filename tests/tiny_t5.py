"""Random small Megatron T5s in NeMo's files.

Dimensions all differ, so that a wrong axis cannot pass. Fused rows are ordered [heads][parts][d]
in the whole tensors; `legacy` files have [parts][heads][d] on each rank.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny import rank_folder, torch_bytes, write_tar

ROOT = "enc_dec_model."
SIDES = ("encoder", "decoder")

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
    fused_activation: bool = True
    openai_gelu: bool = False
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


PLAIN = TinyT5()
# Converted Hugging Face models look like this in NeMo.
BARE = TinyT5(bias=False, normalization="rmsnorm", relative=True, head_bias=False)


def t5_tensors(model: TinyT5 = PLAIN, *, seed: int = 0) -> Tensors:
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
    model: TinyT5 = PLAIN, *, tp: int = 1, pp: int = 1, split: int = 0, nested: bool = True
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
        "bias_activation_fusion": model.fused_activation,
        "openai_gelu": model.openai_gelu,
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
    model: TinyT5 = PLAIN,
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
    model: TinyT5 = PLAIN,
    *,
    tp: int = 1,
    pp: int = 1,
    split: int = 0,
    config: Mapping[str, Any] | None = None,
    nested: bool = True,
) -> Path:
    settings = t5_config(model, tp=tp, pp=pp, split=split, nested=nested) | dict(config or {})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(model.vocab_size - 4))]
    members = {
        "model_config.yaml": json.dumps(settings).encode(),  # JSON is YAML
        "0123_vocab.txt": "\n".join(words).encode(),
    }
    for (t, p), state in t5_states(tensors, model, tp=tp, pp=pp, split=split).items():
        members[rank_folder(t, p, tp=tp, pp=pp) + "model_weights.ckpt"] = torch_bytes(state)
    return write_tar(path, members)
