"""Copies of the recorded Hugging Face sources with other settings or tensors."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tests.json_files import read_json, write_json


def copy_of(
    source: Path,
    target: Path,
    *,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
) -> Path:
    """Copy a folder with config.json and tensors changed; None removes a key or a tensor."""
    shutil.copytree(source, target)
    settings = read_json(target / "config.json") | dict(config or {})
    settings = {k: v for k, v in settings.items() if v is not None or k not in (config or {})}
    write_json(target / "config.json", settings)
    if tensors:
        state = {**read_tensors(target), **tensors}
        for name in ("model.safetensors", "pytorch_model.bin"):
            (target / name).unlink(missing_ok=True)
        kept = {key: value.contiguous() for key, value in state.items() if value is not None}
        safetensors.torch.save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def renamed(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return tensors with each of these parts of their names replaced, one after the other."""
    out = {}
    for name, tensor in tensors.items():
        for before, after in names.items():
            name = name.replace(before, after)
        out[name] = tensor
    return out


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "model.safetensors").exists():
        return dict(safetensors.torch.load_file(folder / "model.safetensors"))
    return dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
