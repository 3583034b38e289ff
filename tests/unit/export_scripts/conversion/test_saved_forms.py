"""However one and the same Hugging Face model was saved, its folder holds the same bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.conversions import folder_of
from tests.json_files import write_json

State = dict[str, torch.Tensor]
PREFIX = "transformer."
HEAD = "lm_head.weight"


def contents(source: Path, output_dir: Path) -> dict[str, bytes]:
    folder = folder_of(source, output_dir, tp_size=2, weight_data_type="fp16", processes=1)
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


@pytest.fixture(scope="module")
def state(shared: Path) -> State:
    state = safetensors.torch.load_file(shared / "golden/gpt2/tiny/source/model.safetensors")
    return {f"{PREFIX}{key.removeprefix(PREFIX)}": value for key, value in state.items()}


@pytest.fixture(scope="module")
def config(shared: Path) -> Path:
    return shared / "golden/gpt2/tiny/source/config.json"


@pytest.fixture(scope="module")
def expected(state: State, config: Path, tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("expected")
    return contents(saved(folder / "source", config, {"model.safetensors": state}), folder / "out")


def saved(folder: Path, config: Path, files: dict[str, Any], *, legacy: bool = False) -> Path:
    folder.mkdir()
    shutil.copy(config, folder / "config.json")
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, content)
        elif name.endswith(".safetensors"):
            safetensors.torch.save_file(content, folder / name, {"format": "pt", "by": "someone"})
        else:
            torch.save(content, folder / name, _use_new_zipfile_serialization=not legacy)
    return folder


def in_shards(state: State, suffix: str, stem: str) -> dict[str, Any]:
    """Return two shards whose numbers and contents are in no order, and their index."""
    keys = sorted(state, key=lambda key: key[::-1])
    shards = {
        f"{stem}-00002-of-00002.{suffix}": {key: state[key] for key in keys[::2]},
        f"{stem}-00001-of-00002.{suffix}": {key: state[key] for key in keys[1::2]},
    }
    places = {key: name for name, shard in shards.items() for key in shard}
    return {**shards, f"{stem}.{suffix}.index.json": {"weight_map": places}}


def one_storage(state: State) -> State:
    """Return the tensors as views of one storage, as flat optimizers keep them."""
    flat = torch.cat([value.reshape(-1) for value in state.values()])
    pieces = flat.split([value.numel() for value in state.values()])
    return {
        key: piece.view(value.shape)
        for (key, value), piece in zip(state.items(), pieces, strict=True)
    }


FORMS: dict[str, Callable[[State], dict[str, Any]]] = {
    "bin": lambda s: {"pytorch_model.bin": s},
    "safetensors shards": lambda s: in_shards(s, "safetensors", "model"),
    "bin shards": lambda s: in_shards(s, "bin", "pytorch_model"),
    "shards without an index": lambda s: {
        name: shard
        for name, shard in in_shards(s, "bin", "pytorch_model").items()
        if name.endswith(".bin")
    },
    "base model": lambda s: {
        "model.safetensors": {key.removeprefix(PREFIX): value for key, value in s.items()}
    },
    "with its tied head": lambda s: {
        "model.safetensors": {**s, HEAD: s[f"{PREFIX}wte.weight"].clone()}
    },
    "with masks of old versions": lambda s: {
        "pytorch_model.bin": {
            **s,
            f"{PREFIX}h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
            f"{PREFIX}h.0.attn.masked_bias": torch.tensor(-1e4),
        }
    },
    "fp64": lambda s: {"pytorch_model.bin": {key: value.double() for key, value in s.items()}},
    "transposed storage": lambda s: {
        "pytorch_model.bin": {
            key: value.t().contiguous().t() if value.ndim == 2 else value
            for key, value in s.items()
        }
    },
    "one storage": lambda s: {"pytorch_model.bin": one_storage(s)},
    "parameters": lambda s: {
        "pytorch_model.bin": {key: torch.nn.Parameter(value) for key, value in s.items()}
    },
    "a training checkpoint": lambda s: {"pytorch_model.bin": {"state_dict": s, "epoch": 3}},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_gives_the_same_folder(form, state, config, expected, tmp_path):
    source = saved(tmp_path / "source", config, FORMS[form](state))
    assert contents(source, tmp_path / "out") == expected


def test_files_of_old_torch_versions_give_the_same_folder(state, config, expected, tmp_path):
    source = saved(tmp_path / "source", config, {"pytorch_model.bin": state}, legacy=True)
    assert contents(source, tmp_path / "out") == expected
