"""One rank's steps: long prompts cut into micro-batches for the pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ft_folders import write_gpt
from tests.rank_threads import logits_of


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("pp_size", [2, 4])
def test_micro_batches_give_the_logits_of_one_stage(
    pp_size: int, shared_memory: bool, tmp_path: Path
) -> None:
    ft_dir = write_gpt(tmp_path, num_layer=4, max_pos_seq_len=700)
    prompt = [(7 * t + t // 50) % 50 for t in range(600)]
    whole = logits_of(ft_dir, prompt, tp_size=1, pp_size=1)
    logits = logits_of(ft_dir, prompt, tp_size=1, pp_size=pp_size, shared_memory=shared_memory)
    # Another order of summation.
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def _widened(folder: Path, target: Path) -> Path:
    """Return a copy of a folder of fp16 with the same values in fp32."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".bin":
            np.fromfile(file, np.float16).astype(np.float32).tofile(target / file.name)
    text = (folder / "config.ini").read_text()
    (target / "config.ini").write_text(text.replace("= fp16", "= fp32"))
    return target


@pytest.mark.parametrize("prompt_len", [1, 40])
def test_weights_in_fp16_lose_nothing_in_fp32(prompt_len: int, tmp_path: Path) -> None:
    folder = write_gpt(tmp_path, weight_data_type="fp16", max_pos_seq_len=64)
    prompt = [(7 * t) % 50 for t in range(prompt_len)]
    in_half = logits_of(folder, prompt, tp_size=1, pp_size=1)
    whole = logits_of(_widened(folder, tmp_path / "fp32"), prompt, tp_size=1, pp_size=1)
    # Another order of summation; rounding values to fp16 as well would show as 1e-3.
    torch.testing.assert_close(in_half, whole, rtol=1e-5, atol=1e-5)
