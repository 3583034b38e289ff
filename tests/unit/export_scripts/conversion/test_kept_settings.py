"""The settings of a source are in the folder that is made of it, or of its shards."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from export_scripts.ft.layout import manifest_path
from foundations.errors import CheckpointMismatchError
from tests.conversions import folder_of, written
from tests.json_files import read_json, write_json
from tests.tiny_transformers import MODELS, write_model

# Settings that the new folder has of its own.
OWN = ("architectures", "dtype", "torch_dtype", "transformers_version")
# One of each form of block; what leads to shards reads the settings of the others as well.
EVERY_WAY = ("gpt2", "gptj", "gptneox-parallel", "llama", "gemma3", "falcon-new", "t5")
# Settings without effect on logits, and tokens in forms that config.ini does not hold.
CHANGES: Mapping[str, Any] = {
    "initializer_range": 0.5, "pad_token_id": 7, "eos_token_id": [2, 9], "bos_token_id": None,
}  # fmt: skip


@pytest.fixture
def source(tmp_path) -> Path:
    """Return a Llama."""
    return write_model("llama", tmp_path / "source")


def through_shards(source: Path, output: Path, **more: Any) -> Path:
    return written(folder_of(source, output), output, **more)


def settings(folder: Path, name: str = "config.json") -> dict[str, Any]:
    table = read_json(folder / name)
    return {key: value for key, value in table.items() if key not in OWN}


def changed(source: Path, **changes: Any) -> Path:
    path = source / "config.json"
    write_json(path, read_json(path) | changes)
    return source


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("bert", "mt5", "opt")])
def test_every_setting_of_a_folder_comes_back(name, tmp_path):
    changes = {} if name.startswith("t5") else CHANGES
    source = changed(write_model(name, tmp_path / "source"), **changes)
    expected = settings(source)
    model_type = "t5_encoder" if name == "t5-encoder" else None
    for way in (written, through_shards) if name in EVERY_WAY else (through_shards,):
        back = way(source, tmp_path / way.__name__, model_type=model_type)
        found = settings(back)
        assert {key: found.get(key, "absent") for key in expected} == expected
        ends = settings(back, "generation_config.json")["eos_token_id"]
        assert name.startswith("t5") or {2, 9} <= set(ends)


@pytest.mark.parametrize("way", [written, through_shards])
def test_a_stated_token_counts_more_than_the_source(way, source, tmp_path):
    changed(source, **CHANGES)
    back = way(source, tmp_path, given=(("end_id", "11"),))
    assert settings(back)["eos_token_id"] == 11
    assert settings(back)["pad_token_id"] == 7


def test_an_end_token_stated_for_shards_is_that_of_the_folder(source, tmp_path):
    changed(source, **CHANGES)
    shards = folder_of(source, tmp_path, given=(("end_id", "11"),))
    back = written(shards, tmp_path)
    assert settings(back)["eos_token_id"] == 11
    assert settings(back, "generation_config.json")["eos_token_id"] in (11, [11])


def test_a_rotary_base_stated_for_a_folder_has_one_spelling(source, tmp_path):
    back = settings(written(source, tmp_path, given=(("rotary_base", "500"),)))
    assert back["rope_theta"] == 500
    assert "rope_parameters" not in back


def neox_release(shared: Path, source: Path) -> Path:
    shutil.copytree(shared / "golden/gptneox_eleuther/train_tp2/source", source)
    with (source / "configs/20B.yml").open("a") as file:
        file.write("max-position-embeddings: 96\n")
    return source


def gptj_release(shared: Path, source: Path) -> Path:
    shutil.copytree(shared / "golden/gptj_slim/tiny/source", source)
    stated = {"n_heads": 4, "seq": 96, "pe_rotary_dims": 4}
    write_json(source / "6B_roto_256.json", stated)
    return source


@pytest.mark.parametrize("way", [written, through_shards])
@pytest.mark.parametrize(
    ("release", "key"),
    [(neox_release, "max_position_embeddings"), (gptj_release, "n_positions")],
)
def test_the_longest_sequence_of_a_release_is_in_the_folder(release, key, way, shared, tmp_path):
    back = way(release(shared, tmp_path / "source"), tmp_path / "out")
    assert settings(back)[key] == 96


def test_a_head_that_is_stated_tied_and_is_not_has_its_own_setting(source, tmp_path):
    back = written(changed(source, tie_word_embeddings=True, pad_token_id=7), tmp_path)
    assert settings(back)["tie_word_embeddings"] is False
    assert settings(back)["pad_token_id"] == 7


def shards_with(source: Path, output: Path, kept: Any) -> Path:
    """Return shards whose manifest holds other settings than their source's."""
    shards = folder_of(source, output)
    path = manifest_path(shards)
    table = read_json(path)
    table["source"]["settings"] = kept
    write_json(path, table)
    return shards


def test_settings_of_a_manifest_bring_neither_code_nor_what_is_not_known(source, tmp_path):
    planted = {
        "auto_map": {"AutoModelForCausalLM": "a--b.C"}, "custom_pipelines": {"a": {"impl": "b.py"}},
        "quantization_config": {"quant_method": "fp8"}, "_name_or_path": "elsewhere", "scale": 3,
    }  # fmt: skip
    shards = shards_with(source, tmp_path, settings(source) | planted | {"pad_token_id": 7})
    assert settings(written(shards, tmp_path)).keys().isdisjoint(planted)
    passed = settings(written(shards, tmp_path / "passed", allow_setting=("scale",)))
    assert passed["scale"] == 3
    assert passed["pad_token_id"] == 7


@pytest.mark.parametrize(
    "kept",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 9.0}, "mlp_bias": True},
        {"hidden_act": ["x"], "num_hidden_layers": "y", "rope_parameters": 3},
        {"sliding_window": 3, "model_type": "mistral"},
    ],
)
def test_settings_of_another_model_leave_the_shards_own(kept, source, tmp_path):
    back = settings(written(shards_with(source, tmp_path, settings(source) | kept), tmp_path))
    assert back["model_type"] == "llama"
    assert not {"mlp_bias", "sliding_window"} & {name for name in back if back[name]}
    assert not back.get("rope_scaling")


def test_settings_that_are_no_table_make_a_manifest_unreadable(source, tmp_path):
    shards = shards_with(source, tmp_path, [1, 2])
    with pytest.raises(CheckpointMismatchError, match="manifest"):
        written(shards, tmp_path)
