"""Distributed checkpoints saved by megatron-core's own ranks become what a classic one becomes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.checkpoints import open_checkpoint
from tests.conversions import contents, folder_of
from tests.json_files import read_json
from tests.looks import relative_error
from tests.megatron_core_checkpoints import Save, save_all
from tests.rank_threads import logits_of

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


@pytest.fixture(scope="module")
def saved(shared: Path, tmp_path_factory) -> Path:
    """Return the folder of all checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    save_all(
        [
            Save(
                str(archive(shared, name)),
                str(folder / name),
                "" if name.endswith("_whole") else str(folder / f"{name.split('_')[0]}_whole"),
                **settings,
            )
            for name, settings in SAVES.items()
        ],
        folder,
    )
    return folder


def archive(shared: Path, name: str) -> Path:
    """Return the classic archive with the same weights."""
    return shared / "golden" / "gpt_mcore" / f"{name.split('_')[0]}_tp1" / "source" / "model.nemo"


def converted(source: Path, out: Path, tp_size: int) -> Path:
    return folder_of(source, out, tp_size=tp_size)


@pytest.mark.parametrize("name", SAVES)
def test_folders_are_those_of_the_classic_archive(shared, saved, tmp_path, name):
    assert open_checkpoint(saved / name).format == "megatron"
    for tp_size in (1, 2, 4):
        expected = contents(converted(archive(shared, name), tmp_path / "classic", tp_size))
        assert contents(converted(saved / name, tmp_path / "out", tp_size)) == expected


@pytest.mark.parametrize("name", ["gpt_tp2_pp2", "llama_singleton"])
def test_folders_give_the_recorded_logits(shared, saved, tmp_path, name):
    case = archive(shared, name).parents[1]
    prompt = read_json(case / "greedy.json")["prompt"]
    expected = np.load(case / "logits.npy")
    folder = converted(saved / name, tmp_path, 2)
    found = logits_of(folder, prompt, tp_size=2, pp_size=1)
    assert relative_error(found, expected) < TOLERANCE
