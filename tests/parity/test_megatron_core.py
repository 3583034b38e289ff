"""Checkpoints made by megatron-core's own GPTModel give that model's logits, for any TP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from tests.rank_threads import logits_of

# Of the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt_tp1", "gpt_tp2", "llama_tp1", "llama_tp2"])
def test_folder_gives_the_recorded_logits(
    shared: Path, tmp_path: Path, name: str, tp_size: int
) -> None:
    case = shared / "golden" / "gpt_mcore" / name
    prompt = json.loads((case / "greedy.json").read_text())["prompt"]
    expected = np.load(case / "logits.npy")
    request = ConversionRequest(
        checkpoint_path=case / "source" / "model.nemo",
        output_dir=tmp_path,
        tp_size=tp_size,
        weight_data_type="fp32",
    )
    summary = convert(request)
    assert summary.family == name.split("_")[0]
    found = logits_of(summary.ft_dir, prompt, tp_size=tp_size, pp_size=1).numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < TOLERANCE
