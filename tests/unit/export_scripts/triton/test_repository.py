"""Assembling a repository around weights: what is written, what is refused, what is left alone."""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export_scripts.triton.model_config import parse_config
from export_scripts.triton.repository import (
    RepositoryRequest,
    build_repository,
    check_repository,
)
from tests.conversions import folder_of
from tests.tiny_transformers import write_model

CONFIG_INI = """[gpt]
model_name = tiny
tensor_para_size = 2
head_num = 4
size_per_head = 6
inter_size = 56
num_layer = 2
max_pos_seq_len = 40
weight_data_type = fp32
vocab_size = 52
start_id = 50
end_id = 51
"""


@pytest.fixture
def request_(tmp_path) -> RepositoryRequest:
    model_dir = tmp_path / "repo" / "tiny_gpt"
    weights = model_dir / "1" / "2-gpu"
    weights.mkdir(parents=True)
    (weights / "config.ini").write_text(CONFIG_INI)
    (weights / "vocab.json").write_text("{}")
    (weights / "merges.txt").write_text("#version: 0.2\n")
    return RepositoryRequest(
        model_dir=model_dir, tp_size=2, pp_size=1, max_batch_size=4, data_type="fp16"
    )


def _config(folder: Path) -> Any:
    return parse_config((folder / "config.pbtxt").read_text())


def _files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_repository_holds_model_text_models_and_ensemble(request_):
    folders = build_repository(request_)
    names = [folder.name for folder in folders]
    assert names == ["tiny_gpt", "preprocessing", "postprocessing", "ensemble"]
    assert [_config(folder).name for folder in folders] == names
    assert all(any((folder / "1").iterdir()) for folder in folders)
    steps = _config(folders[-1]).ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["preprocessing", "tiny_gpt", "postprocessing"]


def test_parameters_say_how_to_run_the_model(request_):
    config = _config(build_repository(replace(request_, parameters={"device": "cpu"}))[0])
    assert {key: value.string_value for key, value in config.parameters.items()} == {
        "tensor_para_size": "2",
        "pipeline_para_size": "1",
        "data_type": "fp16",
        "model_type": "GPT",
        "int8_mode": "0",
        "enable_custom_all_reduce": "0",
        "device": "cpu",
    }


def test_tokenizer_comes_from_the_weights_and_its_end_token_from_their_config(request_):
    folders = build_repository(request_)
    for folder in folders[1:3]:
        assert (folder / "1" / "vocab.json").read_text() == "{}"
        parameters = _config(folder).parameters
        assert parameters["end_id"].string_value == "51"
        assert parameters["start_id"].string_value == "50"
        assert parameters["tokenizer_type"].string_value == "bpe"


def test_portable_repository_holds_no_absolute_path(request_):
    root = request_.model_dir.parent
    build_repository(request_)
    assert not [name for name, data in _files(root).items() if str(root).encode() in data]
    fixed = replace(request_, portable=False, overwrite=True)
    parameters = _config(build_repository(fixed)[0]).parameters
    assert parameters["model_checkpoint_path"].string_value == str(request_.weights_dir)


def test_engines_differ_in_backend_script_and_weights_folder(request_):
    ours = build_repository(request_)[0]
    assert (ours / "1" / "model.py").is_file()
    assert (_config(ours).backend, _config(ours).default_model_filename) == ("python", "")
    theirs = build_repository(replace(request_, engine="fastertransformer", overwrite=True))[0]
    assert not (theirs / "1" / "model.py").exists()
    assert _config(theirs).backend == "fastertransformer"
    assert _config(theirs).default_model_filename == "2-gpu"


BERT_CONFIG = (
    "[bert]\nmodel_name = x\nhead_num = 4\nsize_per_head = 8\ninter_size = 88\nnum_layer = 2\n"
    "weight_data_type = fp32\ntensor_para_size = 2\n"
)


def test_a_bert_is_not_served_as_another_encoder(request_):
    (request_.weights_dir / "config.ini").write_text(BERT_CONFIG)
    with pytest.raises(ValueError, match=r"model_type=T5-Encoder, but .*/2-gpu holds bert\."):
        build_repository(replace(request_, model_type="T5-Encoder"))


@pytest.mark.parametrize("portable", [True, False])
def test_folder_of_a_bert_ends_in_a_slash_for_the_cpp_backend(request_, portable):
    (request_.weights_dir / "config.ini").write_text(BERT_CONFIG)
    request = replace(request_, engine="fastertransformer", ensemble=False, portable=portable)
    config = _config(build_repository(request)[0])
    assert config.default_model_filename == "2-gpu/"
    path = config.parameters["model_checkpoint_path"].string_value
    assert path == ("" if portable else f"{request_.weights_dir}/")


def test_streaming_model_makes_its_ensemble_streaming(request_):
    folders = build_repository(replace(request_, decoupled=True))
    decoupled = [_config(folder).model_transaction_policy.decoupled for folder in folders]
    assert decoupled == [True, False, False, True]


def test_dynamic_batching_is_written_when_asked_for(request_):
    assert not _config(build_repository(request_)[0]).HasField("dynamic_batching")
    batched = replace(request_, max_queue_delay_us=700, overwrite=True)
    batching = _config(build_repository(batched)[0]).dynamic_batching
    assert batching.max_queue_delay_microseconds == 700


def test_building_again_changes_nothing(request_):
    root = request_.model_dir.parent
    build_repository(request_)
    before = _files(root), {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    build_repository(request_)
    assert before == (_files(root), {path: path.stat().st_mtime_ns for path in root.rglob("*")})


def test_other_configuration_is_refused_unless_overwriting(request_):
    build_repository(request_)
    other = replace(request_, max_batch_size=8)
    with pytest.raises(ValueError, match=r"tiny_gpt/config\.pbtxt exists with another") as caught:
        build_repository(other)
    assert "ensemble/config.pbtxt" in str(caught.value)
    build_repository(replace(other, overwrite=True))
    assert _config(request_.model_dir).max_batch_size == 8


def test_weights_without_tokenizer_are_refused_for_an_ensemble_only(request_):
    (request_.weights_dir / "merges.txt").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        build_repository(request_)
    assert not (request_.model_dir / "config.pbtxt").exists()
    assert build_repository(replace(request_, ensemble=False)) == [request_.model_dir]


def test_weights_for_other_ranks_are_refused(request_):
    config = request_.weights_dir / "config.ini"
    wrong = request_.model_dir / "1" / "4-gpu"
    wrong.mkdir()
    (wrong / "config.ini").write_text(config.read_text())
    with pytest.raises(ValueError, match="tensor_para_size = 2, but the folder is named 4-gpu"):
        build_repository(replace(request_, tp_size=4))


def test_all_problems_of_a_request_are_reported_with_their_keys(tmp_path):
    bad = RepositoryRequest(
        model_dir=tmp_path / "ensemble",
        tp_size=0,
        pp_size=1,
        max_batch_size=0,
        data_type="fp8",
        engine="onnx",
        int8_mode=3,
    )
    problems = check_repository(
        bad, names={"tp_size": "export.model.tp", "engine": "deploy.engine"}
    )
    text = "\n".join(problems)
    assert "export.model.tp=0 must be a whole number from 1 to 4096." in text
    assert "max_batch_size=0 must be at least 1." in text
    assert "deploy.engine=onnx has no Triton model; use one of pytorch, fastertransformer." in text
    assert "data_type=fp8 must be one of fp32, fp16, bf16." in text
    assert "int8_mode=3 must be a whole number from 0 to 2." in text
    assert "the name of a text model" in text


def test_parameters_of_the_engine_are_checked_by_its_table(tmp_path):
    wanted = RepositoryRequest(
        model_dir=tmp_path / "gpt",
        tp_size=1,
        pp_size=1,
        max_batch_size=1,
        data_type="fp32",
        model_type="BERT",
        parameters={"max_lanes": "x", "kv_cache_bytes": "-1", "max_lane": "1", "int8_mode": "1"},
    )
    found = check_repository(wanted, names={"parameters": "a.parameters"})
    assert found[0].startswith("model_type=BERT is unknown (did you mean bert?); use one of GPT,")
    assert found[1:3] == [
        "a.parameters.max_lanes=x must be a whole number from 1 to 65536 (most sequences that run "
        "at once).",
        "a.parameters.kv_cache_bytes=-1 must be a whole number from 1 to 1125899906842624 (memory "
        "for keys and values on each rank).",
    ]
    assert found[3].startswith("a.parameters.max_lane=1 is unknown (did you mean max_lanes?); ")
    assert found[4] == (
        "a.parameters.int8_mode=1 is set by export.triton_deployment.int8_mode; set that instead."
    )
    theirs = replace(wanted, engine="fastertransformer", model_type="bert")
    assert check_repository(theirs) == []


@pytest.mark.parametrize(
    ("engine", "model_type", "int8_mode", "reported"),
    [
        ("pytorch", None, 1, ""),
        ("pytorch", "bert", 1, "int8_mode=1 is not supported for BERT by engine=pytorch; use 0."),
        ("pytorch", None, 2, "int8_mode=2 needs engine=fastertransformer; use 0 or 1."),
        ("fastertransformer", "bert", 2, ""),
    ],
)
def test_int8_mode_is_one_switch_of_both_engines(engine, model_type, int8_mode, reported):
    wanted = RepositoryRequest(
        model_dir=Path("/r/gpt"),
        tp_size=1,
        pp_size=1,
        max_batch_size=1,
        data_type="fp32",
        engine=engine,
        model_type=model_type,
        int8_mode=int8_mode,
    )
    assert check_repository(wanted) == ([reported] if reported else [])


def test_interactive_needs_the_settings_of_sessions(request_):
    problems = check_repository(replace(request_, interactive=True))
    assert problems == ["max_batch_size=4 must be 1 for an interactive model."]
    fitting = replace(request_, interactive=True, max_batch_size=1)
    assert _config(build_repository(fitting)[0]).sequence_batching.HasField("oldest")
    inputs = {
        each.name: list(each.dims) for each in _config(fitting.model_dir.parent / "ensemble").input
    }
    assert inputs["INPUT_0"] == [-1, 1]
    assert inputs["session_len"] == [-1, 1]
    ft = replace(fitting, engine="fastertransformer", overwrite=True)
    assert _config(build_repository(ft)[0]).sequence_batching.HasField("direct")


def test_failed_write_leaves_no_model_behind(request_, tmp_path):
    (request_.model_dir.parent / "postprocessing").write_text("in the way")
    with pytest.raises(OSError, match="postprocessing"):
        build_repository(request_)
    assert not (request_.model_dir.parent / "ensemble").exists()
    assert not list(tmp_path.rglob("*.partial"))


KILLS = 20  # times 100 in `make soak`


@pytest.mark.soak
def test_build_killed_at_any_moment_is_finished_by_the_next(request_, soak):
    repository = request_.model_dir.parent
    versions = [replace(request_, max_batch_size=size, overwrite=True) for size in (4, 8)]
    expected = []
    for version in versions:
        build_repository(version)
        expected.append(_files(repository))
    chance = random.Random(2)
    for number in range(KILLS * soak):
        wanted = versions[number % 2]
        child = os.fork()
        if child == 0:
            try:
                build_repository(wanted)
            finally:
                os._exit(0)
        time.sleep(chance.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = _files(repository)
        configs = {name for name in found if name.endswith("/config.pbtxt")}
        assert all(found[name] in (each[name] for each in expected) for name in configs)
        build_repository(wanted)
        # Hidden files stay behind, which neither Triton nor a publication takes.
        files = {name: data for name, data in _files(repository).items() if "/." not in name}
        assert files == expected[number % 2]


def test_a_flipped_bit_of_the_weights_ends_the_export(tmp_path):
    weights = folder_of(
        write_model("gpt2", tmp_path / "source"), tmp_path / "model" / "1", tp_size=2
    )
    request = RepositoryRequest(tmp_path / "model", 2, 1, 4, "fp16", ensemble=False)
    victim = weights / "model.layers.1.mlp.dense_h_to_4h.weight.1.bin"
    content = bytearray(victim.read_bytes())
    for bit in (0, 7 + 8 * (len(content) // 2), 8 * len(content) - 1):
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        with pytest.raises(ValueError, match=rf"is damaged: {victim.name} differs") as error:
            build_repository(request)
        assert "convert it again" in str(error.value)
        assert not list((tmp_path / "model").glob("config.pbtxt"))
        content[bit // 8] ^= 1 << bit % 8
    victim.write_bytes(content)
    assert build_repository(request)


def test_end_tokens_beyond_the_first_are_a_parameter_of_the_text_models(request_):
    folder = request_.model_dir / "1" / "2-gpu"
    (folder / "generation_config.json").write_text('{"eos_token_id": [51, 7], "top_p": 0.5}')
    for given, expected in (({}, "51,7"), ({"end_ids": "9"}, "9")):
        built = build_repository(replace(request_, parameters=given, overwrite=True))
        for part in ("preprocessing", "postprocessing"):
            (path,) = [each for each in built if each.name == part]
            assert _config(path).parameters["end_ids"].string_value == expected
            assert (path / "1" / "generation_config.json").is_file()
