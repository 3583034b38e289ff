"""Settings of megatron-core, alone and in pairs, are computed as by its own model, or refused.

SLIPWAY_MEGATRON_CORE lists interpreters with other releases of it than the installed one.
"""

import collections
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of
from tests.looks import relative_error
from tests.megatron_ranks import OTHERS, run_ranks
from tests.rank_threads import logits_of
from tests.settings_sweep import BASE, IDS, Case, pairs, singles
from tests.unit.export_scripts.checkpoints.test_bridge import write_bridge

# Relative to the largest logit; fp32 on both sides, in another order of summation.
TOLERANCE = 1e-5
PAIRS = 4  # all of them in `make soak`
# Forms of the source, and of the folder that is made of it.
FOLDERS = (
    ("megatron", "fastertransformer"), ("bridge", "fastertransformer"), ("megatron", "huggingface"),
)  # fmt: skip


def outcome(source: Path, expected: torch.Tensor, out: Path, kind: str) -> str:
    """Return "equal", "refused", or by how much the logits of a folder of some kind differ."""
    given = (("start_id", "1"), ("end_id", "2"))
    try:
        folder = folder_of(source, out, given=given, output_format=kind)
    except CheckpointMismatchError:
        return "refused"
    if kind == "fastertransformer":
        found = logits_of(folder, list(IDS), tp_size=1, pp_size=1)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            found = model.eval()(torch.tensor([IDS])).logits[0]
    error = relative_error(found, expected)
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
@pytest.mark.parametrize("python", [None, *OTHERS])
def test_settings_alone_and_in_pairs(python, tmp_path, soak):
    chosen = pairs()
    random.Random(0).shuffle(chosen)
    cases = [*singles(), *chosen[: PAIRS if soak == 1 else None]]
    plan = [
        Case(str(tmp_path / str(number)), BASE | settings, number)
        for number, (_, settings) in enumerate(cases)
    ]
    run_ranks("tests.settings_sweep", plan, tmp_path, python=python)
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
