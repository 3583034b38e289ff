"""One rank's steps: long prompts cut into micro-batches for the pipeline."""

from __future__ import annotations

from pathlib import Path

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
