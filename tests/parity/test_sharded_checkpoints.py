"""Fully sharded checkpoints of real writers become what the model's own folder becomes."""

import shutil
from pathlib import Path

import pytest

from tests.fsdp_checkpoints import save_all
from tests.tiny_transformers import write_model
from tests.unit.export_scripts.checkpoints.test_sharded_huggingface import converted

WAYS = (
    "accelerate_fsdp1", "accelerate_fsdp2", "accelerate_ranks_fsdp1", "accelerate_ranks_fsdp2",
    "verl_fsdp1", "verl_fsdp2", "torch", "automodel", "titan",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with a model, and with what every writer has made of it."""
    folder = tmp_path_factory.mktemp("saved")
    write_model("llama", folder / "model")
    save_all(folder, folder / "ranks.log")
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_saving_gives_the_model_s_folder(way, saved, tmp_path):
    weights = saved / way
    settings = weights / "actor" / "huggingface" if way.startswith("verl") else weights
    settings.mkdir(exist_ok=True)
    for file in (saved / "model").glob("*.json"):
        shutil.copy(file, settings)
    assert converted(weights, tmp_path / "out") == converted(saved / "model", tmp_path / "expected")
