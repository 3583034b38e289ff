"""Mixtures of experts saved by megatron-core's own ranks: what transformers computes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from export_scripts.conversion.convert import convert
from tests.megatron_core_checkpoints import Save, save_all
from tests.tiny import torch_bytes, write_tar
from tests.tiny_megatron_core import CORE
from tests.tiny_mixtures import ARGS, core_mixture
from tests.tiny_transformers import MIXTURES, write_model
from tests.unit.export_scripts.conversion.test_mixtures import logits, request

# The first of each model is saved by one rank; megatron-core cuts the others from it.
SAVES = {
    "whole": {},
    "tp2_ep2": {"tp_size": 2, "ep_size": 2, "prefix": "model."},
    "pp2_ep2": {"pp_size": 2, "ep_size": 2},
    "tp2_pp2_by_expert": {
        "tp_size": 2, "pp_size": 2, "metadata": {"singleton_local_shards": True},
    },
}  # fmt: skip


def write_archive(name: str, folder: Path) -> Path:
    """Write a random mixture as a .nemo archive of one rank, next to its Hugging Face folder."""
    args = ARGS[name]
    state = core_mixture(write_model(name, folder / name, vocab_size=54))
    # megatron-core's own layers, without Transformer Engine, keep the norm apart.
    end = "self_attention.linear_qkv.layer_norm_weight"
    own = {
        f"model.{key.replace(end, 'input_layernorm.weight')}": tensor
        for key, tensor in state.items()
    }
    moe = {key: value for key, value in args.items() if key.startswith("moe_")}
    config = CORE | moe | {
        "num_moe_experts": args["num_experts"], "qk_layernorm": args.get("qk_layernorm", False),
        "rotary_base": args["rotary_base"], "layernorm_epsilon": args["norm_epsilon"],
    }  # fmt: skip
    members = {
        "model_config.yaml": json.dumps(config).encode(),
        "model_weights.ckpt": torch_bytes(own),
    }
    return write_tar(folder / f"{name}.nemo", members)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all checkpoints and of the models that they hold."""
    folder = tmp_path_factory.mktemp("saved")
    archives = {name: write_archive(name, folder) for name in MIXTURES}
    save_all(
        [
            Save(str(archives[name]), str(folder / f"{name}_{form}"), **settings)  # type: ignore[arg-type]
            for name in MIXTURES
            for form, settings in SAVES.items()
        ],
        folder,
    )
    return folder


@pytest.mark.parametrize("name", list(MIXTURES))
def test_every_way_of_cutting_gives_the_model(name: str, saved: Path, tmp_path: Path) -> None:
    expected = logits(saved / name)
    for form in ("nemo", *SAVES):
        source = saved / (f"{name}.nemo" if form == "nemo" else f"{name}_{form}")
        folder = convert(request(source, tmp_path / form)).ft_dir
        torch.testing.assert_close(logits(folder), expected, rtol=0, atol=0)
