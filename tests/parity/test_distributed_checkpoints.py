"""Distributed checkpoints saved by megatron-core's own ranks become what a classic one becomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.checkpoints import open_checkpoint
from export_scripts.conversion.convert import ConversionRequest, convert
from tests.megatron_core_checkpoints import Save, save_all
from tests.rank_threads import logits_of
from tests.tiny import torch_bytes, write_tar
from tests.tiny_megatron_core import CORE
from tests.tiny_mixtures import ARGS, core_mixture
from tests.tiny_transformers import MIXTURES, write_model
from tests.unit.export_scripts.conversion.test_mixtures import logits, request

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5

# The whole of each model is saved by one rank; megatron-core cuts the others from it.
SAVES: dict[str, dict[str, Any]] = {
    "gpt_whole": {},
    "gpt_tp2_pp2": {"tp_size": 2, "pp_size": 2, "prefix": "module.", "with_optimizer": True},
    "llama_whole": {"with_optimizer": True},
    "llama_singleton": {
        "tp_size": 2,
        "pp_size": 2,
        "prefix": "model.",
        "metadata": {"singleton_local_shards": True},
    },
}


# Those of each mixture of experts; Mixtral, which is cut as Qwen3 is, has the first.
MIXTURE_SAVES: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp2_ep2": {"tp_size": 2, "ep_size": 2, "prefix": "model."},
    "pp2_ep2": {"pp_size": 2, "ep_size": 2},
    "tp2_pp2_by_expert": {
        "tp_size": 2, "pp_size": 2, "metadata": {"singleton_local_shards": True},
    },
    # As verl saves it, next to a config.json.
    "tp2_pp2_alone": {"tp_size": 2, "pp_size": 2, "with_args": False, "with_optimizer": True},
}  # fmt: skip


def forms_of(name: str) -> list[str]:
    return [*MIXTURE_SAVES][: 1 if name == "mixtral" else None]


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
def saved(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all checkpoints, and of the mixtures that some of them hold."""
    folder = tmp_path_factory.mktemp("saved")
    saves = [(archive(shared, name), name, settings) for name, settings in SAVES.items()]
    for name in MIXTURES:
        whole = write_archive(name, folder)
        saves += [(whole, f"{name}_{form}", MIXTURE_SAVES[form]) for form in forms_of(name)]
    save_all(
        [
            Save(
                str(path),
                str(folder / name),
                "" if name.endswith("_whole") else str(folder / f"{name.split('_')[0]}_whole"),
                **settings,
            )
            for path, name, settings in saves
        ],
        folder,
    )
    return folder


def archive(shared: Path, name: str) -> Path:
    """Return the classic archive with the same weights."""
    return shared / "golden" / "gpt_mcore" / f"{name.split('_')[0]}_tp1" / "source" / "model.nemo"


def converted(source: Path, out: Path, tp_size: int) -> Path:
    request = ConversionRequest(source, out, tp_size, "fp32")
    return convert(request).ft_dir


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", SAVES)
def test_folders_are_those_of_the_classic_archive(
    shared: Path, saved: Path, tmp_path: Path, name: str
) -> None:
    assert open_checkpoint(saved / name).format == "megatron"
    for tp_size in (1, 2, 4):
        expected = contents(converted(archive(shared, name), tmp_path / "classic", tp_size))
        assert contents(converted(saved / name, tmp_path / "out", tp_size)) == expected


@pytest.mark.parametrize("name", ["gpt_tp2_pp2", "llama_singleton"])
def test_folders_give_the_recorded_logits(
    shared: Path, saved: Path, tmp_path: Path, name: str
) -> None:
    case = archive(shared, name).parents[1]
    prompt = json.loads((case / "greedy.json").read_text())["prompt"]
    expected = np.load(case / "logits.npy")
    folder = converted(saved / name, tmp_path, 2)
    found = logits_of(folder, prompt, tp_size=2, pp_size=1).numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < TOLERANCE


@pytest.mark.parametrize("name", list(MIXTURES))
def test_every_way_of_cutting_gives_the_model(name: str, saved: Path, tmp_path: Path) -> None:
    expected = logits(saved / name)
    for form in ("nemo", *forms_of(name)):
        source = saved / (f"{name}.nemo" if form == "nemo" else f"{name}_{form}")
        alone = saved / name if form.endswith("alone") else None
        wanted = dataclasses.replace(request(source, tmp_path / form), model_config=alone)
        folder = convert(wanted).ft_dir
        torch.testing.assert_close(logits(folder), expected, rtol=0, atol=0)
