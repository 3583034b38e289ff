"""The sample model behind a real tritonserver: tokens, text, many requests at once, errors."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from inference.client import main
from inference.server.client import TritonClient
from inference.server.log import ServerStartError
from inference.server.server import ModelServer
from inference.server.tensors import as_texts
from tests.conftest import ROOT
from tests.contract import tensors_of
from tests.integration.triton_process import hosted, processes
from tests.waiting import lives, until

MODEL = "fastertransformer"
START_LIMIT_S = 120
NEW_TOKENS = 32
Cases = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(
    usual_host: str,
    sample_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ModelServer]:
    repository = sample_repository(tp_size=2)
    with hosted(usual_host, repository, tmp_path_factory.mktemp("log")) as running:
        running.start(timeout_s=START_LIMIT_S)
        yield running


def _request(*prompts: list[int], new_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
    return tensors_of(prompts, new_tokens, **options)


def _answers(outputs: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    """Return prompt and answer of each row, without the end tokens that fill it."""
    lengths = outputs["sequence_length"][:, 0] - max(map(len, prompts))
    return [
        outputs["output_ids"][row, 0, : len(prompt) + int(length)].tolist()
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def test_greedy_tokens_equal_the_recorded_ones_one_by_one_and_in_a_batch(client, greedy_cases):
    prompts = [case["input_ids"] for case in greedy_cases]
    expected = [case["greedy_output_ids"] for case in greedy_cases]
    assert len({len(prompt) for prompt in prompts}) > 1
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert _answers(client.infer(MODEL, _request(prompt)), [prompt]) == [tokens]
    assert _answers(client.infer(MODEL, _request(*prompts)), prompts) == expected


def test_ensemble_turns_text_into_the_recorded_text(client, greedy_cases):
    texts = client.generate_text([case["prompt"] for case in greedy_cases], output_len=NEW_TOKENS)
    assert texts == [[case["greedy_text"]] for case in greedy_cases]
    batched = client.text_request([case["prompt"] for case in greedy_cases], output_len=NEW_TOKENS)
    assert as_texts(client.infer("ensemble", batched)["OUTPUT_0"]) == texts


def test_http_and_grpc_give_the_same_answers(server, client, greedy_cases):
    request = _request(greedy_cases[0]["input_ids"])
    with TritonClient(server.address("http"), protocol="http", timeout_s=240) as http:
        answer = http.infer(MODEL, request)
        text = http.generate_text([greedy_cases[0]["prompt"]], output_len=NEW_TOKENS)
        assert http.is_ready("ensemble")
        assert not http.is_ready("absent")
    assert text == [[greedy_cases[0]["greedy_text"]]]
    for name, value in client.infer(MODEL, request).items():
        np.testing.assert_array_equal(answer[name], value, err_msg=name)


def test_word_lists_and_options_reach_the_model_through_the_ensemble(client, greedy_cases):
    prompt, text = greedy_cases[0]["prompt"], greedy_cases[0]["greedy_text"]
    assert " said" in text[len(prompt) :]
    stopped = client.generate_text(
        [prompt], output_len=NEW_TOKENS, options={"stop_words": "said, said"}
    )
    assert stopped[0][0] == text[: text.index(" said", len(prompt)) + len(" said")]
    banned = client.generate_text(
        [prompt], output_len=NEW_TOKENS, options={"bad_words": "said, said"}
    )
    assert " said" not in banned[0][0][len(prompt) :]
    beams = client.generate_text([prompt], output_len=8, options={"beam_width": 3})
    assert len(set(beams[0])) == 3


def test_many_different_requests_at_once_get_the_answers_they_get_alone(client, greedy_cases):
    requests = [
        _request(
            greedy_cases[i % 4]["input_ids"][: 4 + i % 5],
            new_tokens=3 + i % 11,
            **_mixed_options(i),
        )
        for i in range(48)
    ]
    alone = [client.infer(MODEL, request) for request in requests]
    together = [client.infer_async(MODEL, request) for request in requests]
    for number, (expected, future) in enumerate(zip(alone, together, strict=True)):
        outputs = future.result(60)
        assert set(outputs) == set(expected), number
        for name, value in expected.items():
            if value.dtype.kind == "f":
                # Batches of another size may sum in another order.
                np.testing.assert_allclose(outputs[name], value, atol=2e-4, err_msg=f"{number}")
            else:
                np.testing.assert_array_equal(outputs[name], value, err_msg=f"{number} {name}")


def _mixed_options(i: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {},
        {"runtime_top_k": 5, "random_seed": i},
        {"beam_width": 3},
        {"is_return_log_probs": True},
        {"runtime_top_p": 0.8, "random_seed": 7},
        {"stop_words_list": np.array([[[13], [1]]], np.int32)},
    ]
    return kinds[i % len(kinds)]


def test_bad_request_gets_an_error_that_names_its_tensor_and_harms_no_other(client, greedy_cases):
    good = client.infer_async(MODEL, _request(greedy_cases[0]["input_ids"], new_tokens=8))
    with pytest.raises(InferenceServerException, match=r"input_ids\[0,1\]=9000"):
        client.infer(MODEL, _request([1, 9000], new_tokens=4))
    expected = greedy_cases[0]["greedy_output_ids"][: len(greedy_cases[0]["input_ids"]) + 8]
    assert _answers(good.result(60), [greedy_cases[0]["input_ids"]]) == [expected]


def test_bad_text_gets_an_error_and_the_text_models_live_on(client):
    with pytest.raises(InferenceServerException, match=r"STOP_WORDS_DICT\[0\].*CSV"):
        client.generate_text(["a"], output_len=2, options={"stop_words": "a\nb"})
    column = np.array([[b"\xff"]], dtype=object)
    inputs = {"INPUT_0": column, "INPUT_1": np.array([[2]], np.uint32)}
    with pytest.raises(InferenceServerException, match=r"QUERY\[0\]: not UTF-8"):
        client.infer("ensemble", inputs)
    assert client.generate_text(["a"], output_len=2)


def test_unknown_option_is_answered_with_the_ones_the_ensemble_takes(client):
    with pytest.raises(ValueError, match=r"ensemble takes no top_kk; its options are: INPUT_2"):
        client.generate_text(["a"], output_len=2, options={"top_kk": 1})


def test_client_commands_work_against_the_server(
    server,
    greedy_cases,
    capsys,
    tmp_path,
):
    case = greedy_cases[0]
    url = ["--url", server.address("grpc")]
    assert main(["generate", case["prompt"], "-o", str(NEW_TOKENS), "--top-k", "1", *url]) == 0
    assert capsys.readouterr().out == case["greedy_text"] + "\n"
    assert main(["stream", case["prompt"], "-o", str(NEW_TOKENS), *url]) == 0
    assert capsys.readouterr().out == case["greedy_text"] + "\n"
    assert main(["encode", case["prompt"], *url]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in case["input_ids"]]
    assert main(["health", *url]) == 0
    assert capsys.readouterr().out.startswith("server is ready\nensemble: READY\n")
    request = {
        "config": {"protocol": "grpc", "model_name": MODEL},
        "request": [
            {"name": "input_ids", "data": [case["input_ids"]], "dtype": "uint32"},
            {"name": "input_lengths", "data": [[len(case["input_ids"])]], "dtype": "uint32"},
            {"name": "request_output_len", "data": [[2]], "dtype": "uint32"},
        ],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    assert main(["request", str(tmp_path / "request.json"), *url]) == 0
    assert f"response_input_lengths:\n[[{len(case['input_ids'])}]]\n" in capsys.readouterr().out
    assert main(["generate", "a", "--min-length", "-1", *url]) == 1
    assert "min_length[0]=-1 must be >= 0" in capsys.readouterr().err


def test_dead_worker_fails_requests_with_the_reason_and_ends_the_server(
    usual_host, sample_repository, tmp_path
):
    with hosted(usual_host, sample_repository(tp_size=2, ensemble=False), tmp_path) as server:
        server.start(timeout_s=START_LIMIT_S)
        with TritonClient(server.address("grpc"), timeout_s=30) as client:
            running = processes(server)
            (worker,) = [pid for pid in running if b"inference.ranks.worker" in _command(pid)]
            in_flight = client.infer_async(MODEL, _request([1, 2], new_tokens=500))
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(InferenceServerException, match="rank 1"):
                in_flight.result(20)
        until(lambda: server.poll() is not None, "the end of the server")
        assert f"{MODEL} is out of service: rank 1" in (server.failure() or "")
    until(lambda: not any(map(lives, running)), "the end of its processes")


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_model_of_another_type_than_its_weights_keeps_the_server_from_starting(
    usual_host, sample_repository, tmp_path
):
    repository = sample_repository(tp_size=1, ensemble=False)
    path = repository / "fastertransformer" / "config.pbtxt"
    unknown = 'parameters { key: "is_horse" value { string_value: "1" } }'
    path.write_text(f"{path.read_text().replace('GPT', 'GPT-J')}\n{unknown}\n")
    server = hosted(usual_host, repository, tmp_path)
    with pytest.raises(ServerStartError, match=r"model_type=GPT-J, but .* holds a GPT model"):
        server.start(timeout_s=START_LIMIT_S)
    assert "parameter is_horse is unknown and has no effect" in server.log_path.read_text()


@pytest.mark.parametrize("kind", ["", "_runtime_top_k", "_single", "_ensemble"])
def test_shipped_request_files_are_answered(server, capsys, kind):
    file = ROOT / "examples" / "requests" / f"sample_request{kind}.json"
    params = json.dumps({"config": {"url": server.address("http")}})
    assert main(["request", str(file), "--params", params]) == 0
    assert "sequence_length:" in capsys.readouterr().out
