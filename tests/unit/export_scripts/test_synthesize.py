"""Folders of random weights: complete, the same for every number of ranks, and runnable."""

from pathlib import Path
from typing import Any

import pytest
import torch

from export_scripts.families.table import FAMILIES
from export_scripts.ft.reader import FTReader
from export_scripts.ft.validation import validate_directory
from export_scripts.synthesize import main, synthesize, synthetic_config
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from tests.engine_logits import prompt_logits
from tests.ft_folders import OpenedFolder

SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "vocab": 96}
DECODERS = ("gpt", "gptj", "gptneox", "llama")


def write(folder: Path, name: str, *, tp_size: int = 1, sparse: bool = False) -> Path:
    family = FAMILIES[name]
    config = synthetic_config(
        family, **SIZES, tensor_para_size=tp_size, weight_data_type="fp32", positions=64
    )
    return synthesize(family, config, folder, sparse=sparse)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_complete_and_the_same_for_two_ranks(name, tmp_path):
    one, two = (write(tmp_path, name, tp_size=tp_size) for tp_size in (1, 2))
    assert validate_directory(one) == validate_directory(two) == []
    whole, cut = FTReader(one), FTReader(two)
    assert whole.family.name == name
    for tensor in whole.family.tensors(whole.config):
        if tensor.split is not None:
            parts = [cut.read(tensor.name, rank) for rank in range(2)]
            assert torch.equal(torch.cat(parts, tensor.split), whole.read(tensor.name))


@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_decoders_are_finite(name, tmp_path):
    with Engine(write(tmp_path, name), Placement(device="cpu")) as engine:
        assert torch.isfinite(torch.as_tensor(prompt_logits(engine, [1, 2, 3]))).all()


def test_sparse_matrices_take_no_space(tmp_path):
    family = FAMILIES["gptj"]
    config = synthetic_config(family, hidden=512, layers=1, heads=4, vocab=50400)
    folder = synthesize(family, config, tmp_path, sparse=True)
    assert validate_directory(folder) == []
    embedding = (folder / "model.wte.bin").stat()
    assert embedding.st_blocks * 512 < embedding.st_size / 100


def test_the_command_reports_problems_and_leaves_nothing(tmp_path, capsys):
    sizes = ["--family", "llama", "--hidden", "32", "--layers", "1", "--heads", "4"]
    output = ["--vocab", "64", "--output-dir", str(tmp_path / "out")]
    assert main([*sizes, *output, "--tensor-model-parallel-size", "3"]) == 1
    assert "tensor_para_size=3 does not divide it; use 1, 2, 4" in capsys.readouterr().err
    assert main([*sizes, *output, "--tensor-model-parallel-size", "0"]) == 1
    assert "tensor_para_size=0: expected positive numbers" in capsys.readouterr().err
    assert main([*sizes, *output, "--set", "experts=8"]) == 1
    assert "--set experts=8: llama has no such key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*sizes, *output, "--set", "kv_head_num=2"]) == 0
    folder = tmp_path / "out/1-gpu"
    assert capsys.readouterr().out == f"{folder}\n"
    assert OpenedFolder(folder).config.kv_head_num == 2
    assert main([*sizes, *output]) == 1
    assert f"{folder} exists" in capsys.readouterr().err
