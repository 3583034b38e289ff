"""Repositories made for NVIDIA's backend, served as they are by one server of this project."""

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.decoding.rows import SessionTurn
from inference.server.server import ModelServer
from inference.system.ports import FREE_PORTS
from tests.contract import tensors_of
from tests.ft_folders import unpack_case
from tests.nvidia_repositories import add_nvidia_model, add_text_models

pytestmark = pytest.mark.triton

# Name of the model -> golden case, ranks, parameters of its own; no path: the default filename.
MODELS: dict[str, tuple[str, int, dict[str, str]]] = {
    "fastertransformer": (
        "gpt_nemo/train_tp2_pp1_fp32",
        1,
        {
            "model_type": "GPT",
            "model_checkpoint_path": "{folder}/",
            "enable_custom_all_reduce": "1",
        },
    ),
    # Before there was data_type; sizes came from here, not from config.ini.
    "interactive": (
        "gptneox/parallel_residual",
        1,
        {"model_type": "GPT-NeoX", "is_half": "0", "max_seq_len": "64", "decoder_layers": "3"},
    ),
    "t5": (
        "t5_encoder/from_full_t5",
        1,
        {"model_type": "T5-Encoder", "model_checkpoint_path": "./{relative}", "data_type": "fp16"},
    ),
    "bert": (
        "bert/tiny",
        2,
        {"model_type": "bert", "data_type": "fp16", "is_sparse": "0", "is_remove_padding": "1"},
    ),
}


@pytest.fixture(scope="module")
def server(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    home = tmp_path_factory.mktemp("home")
    repository = home / "all_models"
    for name, (case, tp_size, own) in MODELS.items():
        weights = unpack_case(shared / "golden" / case, home / name, tp_size=tp_size)
        places = {"folder": str(weights), "relative": str(weights.relative_to(home))}
        parameters = {
            "tensor_para_size": str(tp_size),
            "pipeline_para_size": "1",
            **({} if "is_half" in own else {"data_type": "fp32"}),
            **{key: value.format(**places) for key, value in own.items()},
        }
        version = add_nvidia_model(
            repository, name, parameters, keeps_sessions=name == "interactive"
        )
        if "model_checkpoint_path" not in own:
            shutil.copytree(weights, version / f"{name}-weights")
    add_text_models(repository)
    server = ModelServer(
        repository, ports=FREE_PORTS, log_path=home / "triton.log", has_triton=True
    )
    with contextlib.chdir(home), server as running:
        running.start(timeout_s=300)
        yield running


def _column(*values: int) -> np.ndarray[Any, Any]:
    return np.array([[value] for value in values], np.uint32)


def _recorded(shared: Path, name: str) -> tuple[list[int], list[int]]:
    """Return a prompt and its answer, up to the first token that another processor may change."""
    recorded = json.loads((shared / "golden" / MODELS[name][0] / "greedy.json").read_text())
    margins = recorded["top1_minus_top2"]
    count = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
    assert count >= 4
    return recorded["prompt"], recorded["continuation"][:count]


def test_generator_gives_the_recorded_tokens(shared, client):
    prompt, expected = _recorded(shared, "fastertransformer")
    outputs = client.infer("fastertransformer", tensors_of([prompt], len(expected)))
    assert outputs["output_ids"][0, 0].tolist() == prompt + expected


def test_text_models_and_ensemble_of_a_user_stay_as_they_are(shared, client):
    prompt, expected = _recorded(shared, "fastertransformer")
    outputs = client.infer(
        "ensemble",
        {
            "INPUT_0": np.array([[" ".join(map(str, prompt)).encode()]], object),
            "INPUT_1": _column(len(expected)),
            "INPUT_2": np.array([[b""]], object),
            "INPUT_3": np.array([[b""]], object),
        },
    )
    text = " ".join(map(str, prompt + expected)).encode()
    assert outputs["OUTPUT_0"].tolist() == [text]


def test_conversation_goes_on_where_it_was_left(shared, client):
    prompt, expected = _recorded(shared, "interactive")

    def say(words: list[int], count: int, turn: SessionTurn, **options: Any) -> list[int]:
        tensors = tensors_of([words], count, **options)
        outputs = client.infer(
            "interactive", {n: each[None] for n, each in tensors.items()}, turn=turn
        )
        said: list[int] = outputs["output_ids"][0, 0, 0].tolist()
        return said

    first = say(prompt, len(expected), SessionTurn(7, starts=True), session_len=40)
    assert first == prompt + expected
    answer = say([17], 2, SessionTurn(7, ends=True))
    assert answer[: len(prompt + expected) + 1] == [*prompt, *expected, 17]


def test_hidden_states_have_the_type_that_is_computed_in(shared, server, client):
    case = shared / "golden" / MODELS["bert"][0]
    states = np.load(case / "input_hidden_state.npy").astype(np.float16)[None]  # (1, S, E)
    lengths = np.array([[states.shape[1]]], np.int32)
    outputs = client.infer("bert", {"input_hidden_state": states, "sequence_lengths": lengths})
    assert outputs["output_hidden_state"].dtype == np.float16
    expected = np.load(case / "output_hidden_state.npy")
    # Eight units in the last place of fp16 for values up to 4.
    np.testing.assert_allclose(outputs["output_hidden_state"][0], expected, rtol=0, atol=2**-6)
    prompt = _recorded(shared, "t5")[0]
    request = tensors_of([prompt], model="T5-Encoder")
    hidden = client.infer("t5", request)["output_hidden_state"]
    assert hidden.dtype == np.float16
    for name in ("bert", "t5"):
        answer = urllib.request.urlopen(f"http://{server.address('http')}/v2/models/{name}")
        declared = {each["name"]: each["datatype"] for each in json.load(answer)["outputs"]}
        assert declared["output_hidden_state"] == "FP16"


def test_parameters_that_do_nothing_here_are_logged(server):
    log = server.log_path.read_text()
    assert (
        "fastertransformer: parameter enable_custom_all_reduce has no effect in this engine" in log
    )
    assert "interactive: parameter decoder_layers is unknown and has no effect" in log
