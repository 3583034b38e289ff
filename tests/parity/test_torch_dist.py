"""torch_dist checkpoints of Hugging Face models give their logits in megatron-core's own models."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.conversions import folder_of
from tests.looks import relative_error
from tests.megatron_core_models import Load, load_all
from tests.megatron_ranks import OTHERS
from tests.tiny_transformers import write_model

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5
IDS = [3, 17, 41, 5, 5, 29, 11, 50, 2, 8, 33, 19, 44, 7, 1, 23]
# The vocabulary of 53 is padded for two ranks.
CASES = [
    ("llama", "gpt"), ("llama", "hybrid"), ("llama-tied", "hybrid"), ("gpt2", "gpt"),
    ("qwen2", "gpt"), ("qwen3", "gpt"), ("smollm3", "hybrid"), ("qwen2-some-windows", "hybrid"),
    ("mixtral", "gpt"), ("glm", "gpt"), ("qwen2_moe", "gpt"), ("deepseek_v3", "gpt"),
    ("deepseek_v2", "gpt"),
]  # fmt: skip
# Forms and models that differ from these in settings alone.
OTHER_CASES = [
    ("gpt2", "hybrid"), ("mistral", "gpt"), ("mixtral", "hybrid"), ("qwen3-moe", "gpt"),
    ("glm4_moe", "gpt"),
]  # fmt: skip
# Tensor-parallel ranks and pipeline stages.
RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
# Those of other releases of megatron-core, separated by colons.
PYTHONS = [sys.executable, *OTHERS]


@pytest.mark.soak
@pytest.mark.parametrize("python", PYTHONS)
def test_megatron_core_computes_what_transformers_does(python, tmp_path, soak):
    loads = []
    expected = []
    for number, (name, form) in enumerate([*CASES, *(OTHER_CASES if soak > 1 else ())]):
        changes = {"attention_bias": False} if name == "smollm3" else {}
        source = write_model(name, tmp_path / f"{name}-{form}", **changes)
        folder = (
            folder_of(
                source, tmp_path / f"out{number}", output_format="torch_dist", megatron_model=form
            )
            / "release"
        )
        ranks = RANKS if number < 1 or soak > 1 else [RANKS[1 + number % 3]]
        for tp_size, pp_size in ranks:
            logits = str(tmp_path / f"{name}-{form}-{tp_size}-{pp_size}.pt")
            loads.append(Load(str(folder), logits, IDS, tp_size, pp_size))
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        with torch.no_grad():
            expected += [model(torch.tensor([IDS])).logits[0]] * len(ranks)
    load_all(loads, tmp_path, python=python)
    found = [torch.load(load.logits) for load in loads]
    errors = {
        Path(load.logits).stem: relative_error(one, other)
        for load, one, other in zip(loads, found, expected, strict=True)
    }
    assert max(errors.values()) < TOLERANCE, errors
