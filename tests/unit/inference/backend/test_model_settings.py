"""Parameters of a generation model: required, optional, wrong, unknown, and where weights lie."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inference.backend.model_settings import PARAMETERS, ModelSettings, read_settings
from inference.backend.triton_model import ModelArguments
from tests.conftest import ROOT

REQUIRED = {"tensor_para_size": "2", "pipeline_para_size": "1", "data_type": "fp16"}


def _settings(parameters: dict[str, str], **config: Any) -> ModelSettings:
    entries = {key: {"string_value": value} for key, value in parameters.items()}
    return read_settings(
        ModelArguments(
            {
                "model_config": json.dumps({"parameters": entries, **config}),
                "model_repository": "/repo/gpt",
                "model_version": "3",
            }
        )
    )


@pytest.mark.parametrize(
    ("parameters", "file_name", "expected"),
    [
        ({}, "", "/repo/gpt/3/2-gpu"),
        ({}, "model.py", "/repo/gpt/3/2-gpu"),
        ({}, "weights", "/repo/gpt/3/weights"),
        ({"model_checkpoint_path": "/other/place"}, "weights", "/other/place"),
    ],
)
def test_weights_are_looked_for_in_the_contracts_order(
    parameters: dict[str, str], file_name: str, expected: str
) -> None:
    settings = _settings(REQUIRED | parameters, default_model_filename=file_name)
    assert settings.checkpoint_path == Path(expected)


def test_all_missing_and_wrong_parameters_are_listed() -> None:
    with pytest.raises(ValueError, match=r"config\.pbtxt of gpt") as caught:
        _settings(
            {"tensor_para_size": "0", "data_type": "fp8", "strict_lengths": "true"}
            | {"max_stall_s": "nan", "rank_timeout_s": "0"}
        )
    assert str(caught.value).split("\n") == [
        "config.pbtxt of gpt: parameter pipeline_para_size is missing",
        "config.pbtxt of gpt: parameter tensor_para_size='0': must be a whole number of at least 1",
        "config.pbtxt of gpt: parameter data_type='fp8': must be one of fp32, fp16, bf16",
        "config.pbtxt of gpt: parameter strict_lengths='true': must be 0 or 1",
        "config.pbtxt of gpt: parameter max_stall_s='nan': must be a number of seconds above 0",
        "config.pbtxt of gpt: parameter rank_timeout_s='0': must be a number of seconds above 0",
    ]


def test_unknown_parameters_are_kept_for_a_warning() -> None:
    settings = _settings(REQUIRED | {"is_horse": "1", "enable_custom_all_reduce": "1"})
    assert settings.unknown == ("is_horse",)


def test_engine_bounds_come_from_parameters_of_their_names() -> None:
    settings = _settings(
        REQUIRED | {"max_lanes": "3", "max_stall_s": "0.5", "output_log_probs_mode": "full"}
    )
    assert settings.engine.max_lanes == 3
    assert settings.engine.max_stall_s == 0.5
    assert settings.engine.output_log_probs_mode == "full"


def test_the_document_lists_every_parameter() -> None:
    text = (ROOT / "docs" / "engine.md").read_text()
    section = text.split("## Parameters")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(PARAMETERS)
