"""Command inspect: the uses of a path that it lists."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from export_scripts.inspect import describe, main
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of
from tests.tiny_distributed import megatron_common, write_distributed
from tests.tiny_huggingface import copy_of
from tests.tiny_mixtures import ARGS, core_mixture, with_stacked_experts
from tests.tiny_transformers import write_model

OURS = "served from shards by Slipway's engine"
NVIDIA = "served from shards by NVIDIA's backend"
TARGET = "converted to a Hugging Face folder, model type {}"
AS_IT_IS = "served as it is by vLLM, if the installed one knows {}"


def uses(path: Path) -> str:
    return "\n".join(describe(path)["can be"])


@pytest.mark.parametrize(("name", "has_backend"), [("gpt2", True), ("llama", False)])
def test_a_model_and_its_shards(name, has_backend, tmp_path):
    model = write_model(name, tmp_path / "model")
    shards = folder_of(model, tmp_path, tp_size=2)
    for path in (model, shards):
        text = uses(path)
        assert OURS in text
        assert (NVIDIA in text) == has_backend
        assert TARGET.format(name) in text
    assert AS_IT_IS.format(name) in uses(model)
    assert "vLLM, if" not in uses(shards)


def test_a_mixture(tmp_path):
    model = write_model("mixtral", tmp_path / "model")
    source = write_distributed(
        tmp_path / "source",
        with_stacked_experts(core_mixture(model)),
        common=megatron_common(**ARGS["mixtral"], padded_vocab_size=53),
    )
    for path in (model, source):
        assert OURS not in uses(path)
        assert TARGET.format("mixtral") in uses(path)


QUANTISED: dict[str, Any] = {"quantization_config": {"quant_method": "hqq"}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma9"}, "unknown architecture (model type gemma9"),
        (QUANTISED, "quant_method = hqq: known are fp8"),
    ],
)
def test_what_passes_through_alone(changes, words, tmp_path):
    model = copy_of(write_model("llama", tmp_path / "model"), tmp_path / "copy", config=changes)
    for name in ("", "config.json"):
        facts = describe(model / name)
        assert words in facts["cannot be converted"][0]
        (use,) = facts["can be"]
        assert AS_IT_IS.format(changes.get("model_type", "llama")) in use
    (model / "model.safetensors").unlink()
    assert words in describe(model)["cannot be converted"][0]


def test_config_json_alone_gives_family_and_sizes(tmp_path, capsys):
    model = write_model("llama", tmp_path / "model")
    whole = describe(model)
    (model / "model.safetensors").unlink()
    facts = describe(model / "config.json")
    for key in ("family", "parameters", "inference tensor parallel"):
        assert facts[key] == whole[key]
    assert "has a config.json but no weights" in facts["weights"][0]
    assert main([str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["can be"] == facts["can be"]


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("starcoder2", {"num_hidden_layers": 10**9}, "{}: config.json: num_hidden_layers = "
         "1000000000 is not a count; expected a whole number from 1 to 10000"),
        ("qwen2", {"num_hidden_layers": 2**31 - 1}, "{}: config.json: num_hidden_layers"),
        ("t5", {"num_layers": 10**9}, "{}: config.json: num_layers"),
        ("gpt2", {"n_layer": "12"}, "{}: config.json: n_layer = '12' is not a count"),
        ("llama", {"partial_rotary_factor": 1e308}, "{}: config.json: partial_rotary_factor"),
        ("gemma2", {"sliding_window": 1e308}, "{}: config.json: sliding_window = 1e+308"),
        ("t5", {"relative_attention_num_buckets": "x"}, "{}: config.json: relative_attention_num"),
        ("t5", {"relative_attention_num_buckets": 2}, "{}: config.json: relative_attention_num"),
        ("mixtral", {"num_hidden_layers": 9999, "num_local_experts": 9999},
         "{}: config.json: num_layer = 9999, expert_num = 9999: more layers than any model has"),
        ("mixtral", {"num_local_experts": 10**9},
         "{}: config.json: num_layer = 2, expert_num = 1000000000"),
    ],
)  # fmt: skip
def test_a_damaged_size_is_named_at_once(name, changes, words, has_weights, tmp_path):
    model = copy_of(write_model(name, tmp_path / "model"), tmp_path / "copy", config=changes)
    if not has_weights:
        (model / "model.safetensors").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (problem, *_) = describe(model)["cannot be converted"]
    assert problem.startswith(words.format(model))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_folder_without_heads_of_keys_is_refused_by_path(tmp_path):
    shards = folder_of(write_model("llama", tmp_path / "model"), tmp_path)
    ini = shards / "config.ini"
    ini.write_text(ini.read_text().replace("kv_head_num = 2", "kv_head_num = 0"))
    with pytest.raises(CheckpointMismatchError, match=f"{ini}: kv_head_num = 0: expected"):
        describe(shards)
