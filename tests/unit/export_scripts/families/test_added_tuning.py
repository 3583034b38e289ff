"""Prompt tables and IA3 added to folders, also of models that NeMo did not train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from export_scripts.add_tuning import main as add
from export_scripts.conversion.convert import ConversionRequest, convert
from export_scripts.ft.reader import FTReader
from tests.tiny import torch_bytes, write_tar
from tests.tiny_t5 import PLAIN, t5_tensors, write_t5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3
from tests.tiny_transformers import write_model


def write_prompts(path: Path, **tables: torch.Tensor) -> Path:
    """Write an archive as NeMo's prompt learning saves it."""
    config = {
        "task_templates": [
            {"taskname": name, "total_virtual_tokens": len(rows)} for name, rows in tables.items()
        ]
    }
    weights = {f"prompt_table.{n}.prompt_embeddings.weight": rows for n, rows in tables.items()}
    members = {
        "model_config.yaml": json.dumps(config).encode(),  # JSON is YAML
        "model_weights.ckpt": torch_bytes(weights),
    }
    return write_tar(path, members)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("gptj", 24), ("gptneox-parallel", 32), ("gpt2", 24), ("bloom", 24), ("opt", 24)],
)
def test_every_decoder_takes_prompt_tables(name: str, hidden: int, tmp_path: Path) -> None:
    tables = {"boolq": torch.randn(3, hidden), "squad": torch.randn(5, hidden)}
    request = ConversionRequest(
        write_model(name, tmp_path / "source"),
        tmp_path / "out",
        2,
        "fp32",
        prompt_checkpoints=(write_prompts(tmp_path / "prompts.nemo", **tables),),
    )
    reader = FTReader(convert(request).ft_dir)
    found = [(task.task_name, task.prompt_length) for task in reader.config.tasks]
    assert found == [("boolq", 3), ("squad", 5)]
    # The first virtual token follows the vocabulary.
    assert reader.config.prompt_learning_start_id == 53
    for task, rows in tables.items():
        assert torch.equal(reader.read(f"model.prompt_table.{task}.weight"), rows)


def test_tables_of_another_width_are_refused(tmp_path: Path) -> None:
    request = ConversionRequest(
        write_model("gptj", tmp_path / "source"),
        tmp_path / "out",
        1,
        "fp32",
        prompt_checkpoints=(write_prompts(tmp_path / "p.nemo", boolq=torch.randn(3, 23)),),
    )
    with pytest.raises(ValueError, match="boolq"):
        convert(request)
    assert not (tmp_path / "out/1-gpu").exists()


def test_tables_are_added_to_a_folder_without_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model("gptj", tmp_path / "source")
    ft_dir = convert(ConversionRequest(source, tmp_path / "out", 2, "fp16")).ft_dir
    before = {path.name: path.read_bytes() for path in ft_dir.iterdir()}
    first, second = torch.randn(3, 24), torch.randn(4, 24)
    write_prompts(tmp_path / "boolq.nemo", boolq=first)
    write_prompts(tmp_path / "squad.nemo", squad=second)
    words = ["--ft-dir", str(ft_dir), "--output-dir", str(tmp_path / "one")]
    assert add([*words, "--prompt-checkpoint", str(tmp_path / "boolq.nemo")]) == 0
    one = Path(capsys.readouterr().out.strip())
    words = ["--ft-dir", str(one), "--output-dir", str(tmp_path / "two")]
    assert add([*words, "--prompt-checkpoint", str(tmp_path / "squad.nemo")]) == 0
    reader = FTReader(Path(capsys.readouterr().out.strip()))
    assert [task.task_name for task in reader.config.tasks] == ["boolq", "squad"]
    assert reader.config.prompt_learning_start_id == 53
    assert torch.equal(reader.read("model.prompt_table.boolq.weight"), first.half())
    assert torch.equal(reader.read("model.prompt_table.squad.weight"), second.half())
    # The folder itself is as it was.
    assert {path.name: path.read_bytes() for path in ft_dir.iterdir()} == before
    assert add([*words, "--prompt-checkpoint", str(tmp_path / "boolq.nemo")]) == 1
    assert "has tables of boolq already" in capsys.readouterr().err


@pytest.fixture
def gptj_words(tmp_path: Path) -> list[str]:
    """Return the options that name a converted GPT-J and a new folder."""
    source = write_model("gptj", tmp_path / "source")
    ft_dir = convert(ConversionRequest(source, tmp_path / "out", 1, "fp32")).ft_dir
    return ["--ft-dir", str(ft_dir), "--output-dir", str(tmp_path / "new")]


def test_tables_that_do_not_fit_the_folder_leave_nothing(
    gptj_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_prompts(tmp_path / "p.nemo", boolq=torch.randn(3, 23))
    assert add([*gptj_words, "--prompt-checkpoint", str(path)]) == 1
    assert "boolq.weight: it gives shape [3, 23], expected [3, 24]" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_ia3_added_to_a_folder_gives_the_folder_converted_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_t5(tmp_path / "t5.nemo", t5_tensors())
    tasks = [write_ia3(tmp_path / f"{seed}.nemo", ia3_scalers(PLAIN, seed=seed)) for seed in (1, 2)]
    plain = convert(ConversionRequest(source, tmp_path / "plain", 2, "fp16")).ft_dir
    request = ConversionRequest(source, tmp_path / "whole", 2, "fp16", ia3_checkpoints=tuple(tasks))
    whole = convert(request).ft_dir
    words = ["--ft-dir", str(plain), "--output-dir", str(tmp_path / "added")]
    for task in tasks:
        words += ["--ia3-checkpoint", str(task)]
    assert add(words) == 0
    added = Path(capsys.readouterr().out.strip())
    assert {path.name: path.read_bytes() for path in added.glob("*.bin")} == {
        path.name: path.read_bytes() for path in whole.glob("*.bin")
    }
    assert FTReader(added).config == FTReader(whole).config
    words[1], words[3] = str(added), str(tmp_path / "again")
    assert add(words) == 1
    assert "has 2 IA3 tasks already" in capsys.readouterr().err


def test_a_folder_without_a_place_for_prompts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model("bert", tmp_path / "source")
    ft_dir = convert(ConversionRequest(source, tmp_path / "out", 1, "fp32")).ft_dir
    archive = write_prompts(tmp_path / "p.nemo", boolq=torch.randn(3, 24))
    words = ["--ft-dir", str(ft_dir), "--output-dir", str(tmp_path / "new")]
    assert add([*words, "--prompt-checkpoint", str(archive)]) == 1
    assert "a bert folder has no place for prompts" in capsys.readouterr().err


def test_a_folder_without_a_place_for_ia3_is_refused(
    gptj_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_ia3(tmp_path / "ia3.nemo", ia3_scalers(PLAIN))
    assert add([*gptj_words, "--ia3-checkpoint", str(archive)]) == 1
    assert "a gptj folder has no place for IA3" in capsys.readouterr().err
    assert add(gptj_words) == 1
    assert "nothing to add" in capsys.readouterr().err
