"""Settings of megatron-core, alone and in pairs, are computed as by its own model, or refused.

MEGATRON_PYTHON names a Python with another megatron-core than the installed one.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export_scripts.conversion.convert import ConversionRequest, convert
from foundations.errors import CheckpointMismatchError
from tests.rank_threads import logits_of
from tests.settings_sweep import BASE, IDS, pairs, singles
from tests.unit.export_scripts.checkpoints.test_bridge import write_bridge

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5
ROOT = Path(__file__).resolve().parents[2]
PAIRS = 4  # all of them in `make soak`
# Forms of the source, and of the folder that is made of it.
FOLDERS = (
    ("megatron", "fastertransformer"), ("bridge", "fastertransformer"), ("megatron", "huggingface"),
)  # fmt: skip


def built(cases: list[tuple[str, dict[str, Any]]], folder: Path) -> None:
    """Let megatron-core save the models of some cases in folders of their numbers."""
    plan = folder / "plan.json"
    plan.write_text(
        json.dumps([(str(folder / str(n)), BASE | each) for n, (_, each) in enumerate(cases)])
    )
    python = os.environ.get("MEGATRON_PYTHON", sys.executable)
    if python == sys.executable:
        importlib.metadata.version("megatron-core")  # raises if it is not installed
    command = [python, "-m", "tests.settings_sweep", str(plan)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)


def outcome(source: Path, expected: torch.Tensor, out: Path, kind: str) -> str:
    """Return "equal", "refused", or by how much the logits of a folder of some kind differ."""
    given = (("start_id", "1"), ("end_id", "2"))
    request = ConversionRequest(source, out, 1, "fp32", given=given, output_format=kind)
    try:
        folder = convert(request).ft_dir
    except CheckpointMismatchError:
        return "refused"
    if kind == "fastertransformer":
        found = logits_of(folder, list(IDS), tp_size=1, pp_size=1)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            found = model.eval()(torch.tensor([IDS])).logits[0]
    error = float((found - expected).abs().max() / expected.abs().max())
    return "equal" if error < TOLERANCE else f"wrong by {error:.1e}"


def bridge_model(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron Bridge writes of settings."""
    names = {"squared_relu": "megatron.core.activations.squared_relu"}
    kind = settings["activation_func"]
    function = names.get(kind, f"torch.nn.functional.{kind}")
    return settings | {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "activation_func": {"_target_": function, "_call_": False},
    }


@pytest.mark.soak
def test_settings_alone_and_in_pairs(tmp_path: Path, soak: int) -> None:
    chosen = pairs()
    random.Random(0).shuffle(chosen)
    cases = [*singles(), *chosen[: PAIRS if soak == 1 else None]]
    built(cases, tmp_path)
    counts: collections.Counter[str] = collections.Counter()
    wrong = {}
    for number, (name, settings) in enumerate(cases):
        folder = tmp_path / str(number)
        if (folder / "unbuilt").is_file():
            counts["not built by megatron-core"] += 1
            continue
        expected = torch.load(folder / "logits.pt")
        state = torch.load(folder / "state.pt")
        write_bridge(folder / "bridge", state, bridge_model(BASE | settings), stacked=False)
        # Only a Hugging Face folder holds experts.
        few = FOLDERS[2:] if name.startswith("experts") else (FOLDERS[number % 2],)
        for form, kind in FOLDERS if soak > 1 else few:
            if not (folder / form).is_dir():
                continue
            found = outcome(folder / form, expected, folder / f"out-{form}", kind)
            counts[found.split()[0]] += 1
            if found.startswith("wrong"):
                wrong[f"{name} ({form}, {kind})"] = found
    print(len(singles()), "settings,", len(cases) - len(singles()), "pairs:", dict(counts))
    assert not wrong
    assert counts["equal"] > 30
    assert counts["refused"] > 5
