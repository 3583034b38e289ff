"""One rank's steps: long prompts cut into micro-batches for the pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference.model.step import Segment
from inference.ranks.plan import StepPlan
from tests.ft_folders import write_gpt, write_random
from tests.parity.test_cuda import MODELS
from tests.rank_threads import logits_of, on_ranks


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "gloo"])
@pytest.mark.parametrize("pp_size", [2, 4])
def test_micro_batches_give_the_logits_of_one_stage(pp_size, shared_memory, tmp_path):
    ft_dir = write_gpt(tmp_path, num_layer=4, max_pos_seq_len=700)
    prompt = [(7 * t + t // 50) % 50 for t in range(600)]
    whole = logits_of(ft_dir, prompt, tp_size=1, pp_size=1)
    logits = logits_of(ft_dir, prompt, tp_size=1, pp_size=pp_size, shared_memory=shared_memory)
    # Another order of summation.
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_last_layer_that_computes_wanted_rows_gives_their_logits(name, tmp_path):
    ft_dir = write_random(*MODELS[name], tmp_path)
    prompt = [5, 3, 9, 1, 12, 7, 2, 4, 8]

    def work(rank: Any) -> torch.Tensor:
        for start, stop, rows in ((0, 5, []), (5, 9, [1, 3])):
            segment = Segment(1, start, stop - start)
            plan = StepPlan(ids=prompt[start:stop], segments=(segment,), output_rows=rows)
            result = rank.run(plan)
        logits: torch.Tensor = result.logits[:, : rank.architecture.vocab_size]
        return logits

    whole = logits_of(ft_dir, prompt, tp_size=1, pp_size=1)
    logits = on_ranks(ft_dir, work, slots=2, max_len=len(prompt))
    torch.testing.assert_close(logits, whole[[6, 8]], rtol=1e-4, atol=1e-4)


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
def test_weights_in_fp16_lose_nothing_in_fp32(prompt_len, tmp_path):
    folder = write_gpt(tmp_path, weight_data_type="fp16", max_pos_seq_len=64)
    prompt = [(7 * t) % 50 for t in range(prompt_len)]
    in_half = logits_of(folder, prompt, tp_size=1, pp_size=1)
    whole = logits_of(_widened(folder, tmp_path / "fp32"), prompt, tp_size=1, pp_size=1)
    # Another order of summation; rounding values to fp16 as well would show as 1e-3.
    torch.testing.assert_close(in_half, whole, rtol=1e-5, atol=1e-5)
