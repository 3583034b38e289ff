"""Prompt tables and IA3 added to folders, also of models that NeMo did not train."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, check_conversion, convert
from tests.conversions import converted, folder_of
from tests.tiny import write_archive
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
    return write_archive(path, config, weights)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("gptj", 24), ("gptneox-parallel", 32), ("gpt2", 24), ("bloom", 24), ("opt", 24)],
)
def test_every_decoder_takes_prompt_tables(name, hidden, tmp_path):
    tables = {"boolq": torch.randn(3, hidden), "squad": torch.randn(5, hidden)}
    reader = converted(
        write_model(name, tmp_path / "source"),
        tmp_path / "out",
        tp_size=2,
        prompt_checkpoints=(write_prompts(tmp_path / "prompts.nemo", **tables),),
    )
    found = [(task.task_name, task.prompt_length) for task in reader.config.tasks]
    assert found == [("boolq", 3), ("squad", 5)]
    # The first virtual token follows the vocabulary.
    assert reader.config.prompt_learning_start_id == 53
    for task, rows in tables.items():
        assert torch.equal(reader.read(f"model.prompt_table.{task}.weight"), rows)


def test_tables_of_another_width_are_refused(tmp_path):
    with pytest.raises(ValueError, match="boolq"):
        folder_of(
            write_model("gptj", tmp_path / "source"),
            tmp_path / "out",
            prompt_checkpoints=(write_prompts(tmp_path / "p.nemo", boolq=torch.randn(3, 23)),),
        )
    assert not (tmp_path / "out/1-gpu").exists()


def test_prompts_and_ia3_leave_only_if_they_may_be_left_out(tmp_path):
    archive = write_prompts(tmp_path / "p.nemo", boolq=torch.randn(3, 24))
    source = write_model("gpt2", tmp_path / "source")
    request = ConversionRequest(
        source, tmp_path, 1, "fp32", prompt_checkpoints=(archive,), output_format="huggingface"
    )
    (problem,) = check_conversion(request)
    assert "prompt:boolq has no place in a Hugging Face folder" in problem
    plain = convert(replace(request, prompt_checkpoints=(), output_dir=tmp_path / "plain")).ft_dir
    for name in ("model.safetensors", "config.json"):
        found = convert(replace(request, allow=("prompt:*",))).ft_dir / name
        assert found.read_bytes() == (plain / name).read_bytes()
    task = write_ia3(tmp_path / "ia3.nemo", ia3_scalers(PLAIN))
    t5 = write_t5(tmp_path / "t5.nemo", t5_tensors())
    tuned = replace(request, checkpoint_path=t5, prompt_checkpoints=(), ia3_checkpoints=(task,))
    assert "ia3:0 has no place" in check_conversion(tuned)[0]
