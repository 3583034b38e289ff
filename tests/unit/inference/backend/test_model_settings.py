"""Parameters of a generation model: required, optional, wrong, unknown, and where weights lie."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from export_scripts.triton.parameters import PARAMETERS
from foundations.tables import markdown_table
from inference.backend.model_settings import ModelSettings, read_settings
from inference.backend.triton_model import triton_arguments
from inference.engine.options import EngineOptions
from tests.conftest import ROOT

REQUIRED = {"tensor_para_size": "2", "pipeline_para_size": "1", "data_type": "fp16"}


def _settings(parameters: dict[str, str], **config: Any) -> ModelSettings:
    entries = {key: {"string_value": value} for key, value in parameters.items()}
    return read_settings(
        triton_arguments(
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
        ({"model_checkpoint_path": "/"}, "weights", "/"),
    ],
)
def test_weights_are_looked_for_in_the_contracts_order(parameters, file_name, expected):
    settings = _settings(REQUIRED | parameters, default_model_filename=file_name)
    assert settings.checkpoint_path == Path(expected)


def test_all_missing_and_wrong_parameters_are_listed():
    with pytest.raises(ValueError, match=r"config\.pbtxt of gpt") as caught:
        _settings(
            {"tensor_para_size": "0", "data_type": "fp8", "strict_lengths": "true"}
            | {"max_stall_s": "nan", "rank_timeout_s": "0"}
        )
    assert [
        line.removeprefix("config.pbtxt of gpt: parameter ")
        for line in str(caught.value).split("\n")
    ] == [
        "tensor_para_size='0': must be a whole number from 1 to 4096",
        "pipeline_para_size is missing",
        "data_type='fp8': must be one of fp32, fp16, bf16",
        "max_stall_s='nan': must be a number of seconds above 0, at most 3600",
        "rank_timeout_s='0': must be a number of seconds above 0, at most 2592000",
        "strict_lengths='true': must be 0 or 1",
    ]


def test_relative_path_counts_from_where_the_server_was_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = {"model_checkpoint_path": "./models/gpt/2-gpu/"}
    with pytest.raises(ValueError, match=r"path=\./models/gpt/2-gpu/ is relative, and there is"):
        _settings(REQUIRED | path)
    absent = {"model_checkpoint_path": str(tmp_path / "absent")}
    with pytest.raises(ValueError, match="absent does not exist on this machine"):
        _settings(REQUIRED | absent)
    (tmp_path / "models" / "gpt" / "2-gpu").mkdir(parents=True)
    assert _settings(REQUIRED | path).checkpoint_path == tmp_path / "models" / "gpt" / "2-gpu"


@pytest.mark.parametrize(("is_half", "data_type"), [("1", "fp16"), ("0", "fp32")])
def test_older_files_say_is_half(is_half, data_type):
    sizes = {"tensor_para_size": "2", "pipeline_para_size": "1"}
    assert _settings(sizes | {"is_half": is_half}).placement.data_type == data_type
    assert _settings(REQUIRED | {"is_half": "0"}).placement.data_type == "fp16"


def test_unknown_parameters_are_kept_for_a_warning():
    settings = _settings(REQUIRED | {"is_horse": "1", "enable_custom_all_reduce": "1"})
    assert settings.unknown == ("is_horse",)
    assert settings.without_effect == ("enable_custom_all_reduce",)


def test_engine_bounds_come_from_parameters_of_their_names():
    settings = _settings(
        REQUIRED | {"max_lanes": "3", "max_stall_s": "0.5", "output_log_probs_mode": "full"}
    )
    assert settings.engine.max_lanes == 3
    assert settings.engine.max_stall_s == 0.5
    assert settings.engine.output_log_probs_mode == "full"


def test_the_document_shows_the_table():
    rows = [
        (f"`{name}`", each.default, each.kind.words, each.meaning)
        for name, each in PARAMETERS.items()
    ]
    table = markdown_table(("parameter", "default", "takes", ""), rows)
    assert table in (ROOT / "docs" / "engine.md").read_text()


def test_options_of_the_engine_are_parameters_with_the_same_defaults():
    defaults = EngineOptions()
    options = {field.name for field in fields(EngineOptions)} - {
        "session_idle_s",  # of the sequence batching in config.pbtxt
        "sharing_engines",  # of the instances in config.pbtxt
    }
    assert options <= set(PARAMETERS)
    for name in options:
        value = getattr(defaults, name)
        assert value is None or PARAMETERS[name].kind.read(PARAMETERS[name].default) == value
