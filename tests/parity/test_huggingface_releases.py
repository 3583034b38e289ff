"""Folders that leave compute the same in every release of transformers, from sources and shards.

This environment's release is asked about the settings that releases spell differently; those of
SLIPWAY_TRANSFORMERS, interpreters separated as in PATH, about every model of the tests.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversions import folder_of, remarks_of, written
from tests.folder_answers import OTHERS, answered
from tests.json_files import read_json
from tests.looks import relative_error
from tests.parity.test_huggingface_families import DECODERS, IDS, TOLERANCE, build
from tests.tiny_transformers import MIXTURES, ROTARY, VARIANTS, write_model

# Models that transformers 4 cannot compute, and its behaviour instead.
NOT_IN_4 = {"olmo2-yarn": "refuses", "nemotron-linear": "ignores", "phi3-factor": "refuses"}
SCALED = [name for name in ROTARY if name not in NOT_IN_4]
QUICK = (*SCALED, "gemma2-no-caps", "gemma3-linear", "phi3-longrope", "qwen2-some-windows")
# It lacks some, and computes the parameters of an Apertus's activation in bf16.
OTHERWISE_IN_4 = (
    "ministral3", "apertus", "cwm", "exaone3", "internlm3", "iquestcoder", "hyperclovax", "jais2",
)  # fmt: skip
EVERY = [
    name
    for name in (*DECODERS, *VARIANTS)
    if name not in NOT_IN_4 and not name.startswith(OTHERWISE_IN_4)
]


def through_shards(source: Path, folder: Path) -> Path:
    return written(folder_of(source, folder), folder)


def folders(python: str | None, path: Path) -> Iterator[tuple[str, Path, torch.Tensor]]:
    """Yield folders with the logits of what they were made of."""
    for name in QUICK if python is None else EVERY:
        model, source = build(name), path / name / "source"
        model.save_pretrained(source)
        with torch.no_grad():
            logits = model(torch.tensor([IDS])).logits[0]
        yield f"{name} from its source", written(source, path / name / "direct"), logits
        yield f"{name} from shards", through_shards(source, path / name / "shards"), logits
    for name in MIXTURES if python is not None else ():
        source = write_model(name, path / name / "source")
        (expected,) = answered([{"folder": str(source), "ids": IDS}], None)
        folder = written(source, path / name / "direct")
        yield f"{name} from its source", folder, torch.tensor(expected)


@pytest.mark.parametrize("python", [None, *OTHERS])
def test_folders_have_the_logits_of_their_sources(python, tmp_path):
    made = list(folders(python, tmp_path))
    answers = answered([{"folder": str(folder), "ids": IDS} for _, folder, _ in made], python)
    wrong = {}
    for (name, _, expected), found in zip(made, answers, strict=True):
        if isinstance(found, str):
            wrong[name] = found
            continue
        error = relative_error(found, expected)
        if not error < TOLERANCE:
            wrong[name] = f"{error:.1e}"
    assert not wrong


# Recorded of the folders with which both 4.57.6 and 5.24.0 passed the test above.
SPELLED: Mapping[str, Mapping[str, Any]] = {
    "llama-longrope": {"rope_theta": 10000.0, "original_max_position_embeddings": 10},
    "llama-yarn-factor": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.3, "truncate": True,
        },
    },
    "olmo2-linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "olmo2-dynamic": {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
    "phi3-longrope": {
        "original_max_position_embeddings": 10,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1 + n / 8 for n in range(3)],
            "long_factor": [2 + n / 2 for n in range(3)],
        },
    },
    "starcoder2-base": {"rope_theta": 700.0},
    "nemotron-base": {"rope_theta": 700.0, "partial_rotary_factor": 0.5},
    "gemma2-no-caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3-linear": {
        "rope_theta": 1e5, "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "falcon-new-one-key-head": {"new_decoder_architecture": True, "num_kv_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_settings_have_the_spelling_that_both_releases_read(name, tmp_path):
    build(name).save_pretrained(tmp_path / "source")
    folder = through_shards(tmp_path / "source", tmp_path)
    settings = read_json(folder / "config.json")
    assert {key: settings.get(key, "absent") for key in SPELLED[name]} == SPELLED[name]
    assert settings["torch_dtype"] == "float32"


@pytest.mark.parametrize("name", NOT_IN_4)
def test_a_remark_says_what_transformers_4_cannot_compute(name, tmp_path):
    build(name).save_pretrained(tmp_path / "source")
    source = tmp_path / "source"
    remarks = remarks_of(source, tmp_path, output_format="huggingface").splitlines()
    kind = name.partition("-")[0]
    (remark,) = [each for each in remarks if "transformers 4" in each]
    assert NOT_IN_4[name] in remark
    assert kind in remark
