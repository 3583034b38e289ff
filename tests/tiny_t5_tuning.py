"""Archives of NeMo with the tuned parts of a tiny T5: IA3, linear adapters, prompt tables."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.tiny import rank_folder, torch_bytes, write_archive, write_tar
from tests.tiny_t5 import PLAIN, ROOT, SIDES, Tensors, TinyT5, t5_states

_SUBLAYER = {"key": "self_attention", "value": "self_attention", "mlp": "mlp"}


def ia3_scalers(model: TinyT5 = PLAIN, *, seed: int = 0) -> Tensors:
    """Return a task's scalers as "<side>.<layer>.<kind>"."""
    generator = torch.Generator().manual_seed(1000 + seed)
    scalers = {}
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
    model: TinyT5 = PLAIN,
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


def adapter_tensors(model: TinyT5 = PLAIN, *, width: int = 12, seed: int = 0) -> Tensors:
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
    model: TinyT5 = PLAIN,
    *,
    width: int = 12,
    tuning: Mapping[str, Any] | None = None,
    **layout: int,
) -> Path:
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
    return write_archive(path, config, state)
