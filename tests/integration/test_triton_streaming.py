"""The sample model as a streaming (decoupled) model behind a real tritonserver."""

import itertools
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from inference.client import main
from inference.server.server import ModelServer
from tests.contract import tensors_of
from tests.integration.triton_process import hosted
from tests.waiting import until

MODEL = "fastertransformer"
NEW_TOKENS = 32
LONG = 480
Cases = list[dict[str, Any]]
_METRIC = re.compile(
    r"(?P<name>(?:slipway|nv_inference)_\w+)"
    rf'\{{(?P<labels>[^}}]*model="{MODEL}"[^}}]*)\}} (?P<value>\S+)'
)


@pytest.fixture(scope="module")
def server(
    host: str,
    sample_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ModelServer]:
    # One slot: a second request waits until the first has ended or was cancelled.
    repository = sample_repository(tp_size=1, decoupled=True, parameters={"max_lanes": "1"})
    with hosted(host, repository, tmp_path_factory.mktemp("log")) as running:
        running.start(timeout_s=120)
        yield running


def _request(prompt: list[int], new_tokens: int, **options: Any) -> dict[str, Any]:
    return tensors_of([prompt], new_tokens, **options)


def _tokens(frame: dict[str, Any]) -> list[int]:
    row: list[int] = frame["output_ids"][0, 0, : int(frame["sequence_length"][0, 0])].tolist()
    return row


def test_every_token_comes_as_one_frame_and_the_last_holds_the_recorded_answer(
    client, greedy_cases
):
    for case in greedy_cases:
        prompt = case["input_ids"]
        frames = list(client.stream(MODEL, _request(prompt, NEW_TOKENS)))
        shown = [_tokens(frame) for frame in frames]
        assert [len(tokens) for tokens in shown] == [
            len(prompt) + n for n in range(1, NEW_TOKENS + 1)
        ]
        assert all(a == b[:-1] for a, b in itertools.pairwise(shown))
        assert shown[-1] == case["greedy_output_ids"]
        assert all(frame["output_ids"].shape[2] == len(prompt) + NEW_TOKENS for frame in frames)


def test_text_arrives_in_pieces_that_make_up_the_recorded_text(client, greedy_cases):
    for case in greedy_cases[:2]:
        pieces = list(client.stream_text(case["prompt"], output_len=NEW_TOKENS))
        assert "".join(pieces) == case["greedy_text"]
        assert len(pieces) > NEW_TOKENS // 2


def test_whole_answers_come_from_a_streaming_model_too(client, greedy_cases):
    case = greedy_cases[0]
    texts = client.generate_text([case["prompt"]] * 3, output_len=NEW_TOKENS)
    assert texts == [[case["greedy_text"]]] * 3
    assert (
        _tokens(client.infer(MODEL, _request(case["input_ids"], NEW_TOKENS)))
        == (case["greedy_output_ids"])
    )


def test_a_request_without_a_required_input_is_refused_by_name(server, client):
    text = {"INPUT_0": np.array([[b"It was"]], np.object_)}
    for ask in (client.infer, lambda *request: list(client.stream(*request))):
        with pytest.raises(InferenceServerException, match="lacks 'INPUT_1', which the model req"):
            ask("ensemble", text)
    for model, action, request, said in (
        ("ensemble", "generate_stream", {}, "lacks 'INPUT_0', 'INPUT_1', which"),
        ("ensemble", "generate_stream", {"INPUT_0": "It was"}, "lacks 'INPUT_1', which"),
        ("ensemble", "generate", {"INPUT_0": "a", "INPUT_1": 1 << 32}, "UINT32 should be less"),
        (MODEL, "generate_stream", {"input_ids": [5, 1]}, "'input_lengths', 'request_output_len'"),
    ):
        url = f"http://127.0.0.1:{server.ports['http']}/v2/models/{model}/{action}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(url, data=json.dumps(request).encode(), timeout=60)
        assert caught.value.code == 400
        assert said in caught.value.read().decode()


def test_leaving_a_stream_frees_its_place_before_its_end(server, client):
    def cancelled() -> float:
        return metrics(server).get("slipway_requests_total cancelled", 0.0)

    before = cancelled()
    options = {"min_length": LONG}
    stream = client.stream(MODEL, _request([5, 6], LONG, **options))
    next(stream)
    stream.close()
    assert len(list(client.stream(MODEL, _request([7, 8], 1)))) == 1
    until(lambda: cancelled() == before + 1, "the request that was given up")


def test_the_metrics_agree_with_what_a_client_measures(server, client):
    before = settled_metrics(server)
    rounds, walls, firsts = 3, 0.0, 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        frames = [time.perf_counter() for _ in client.stream(MODEL, _request([5, 6], NEW_TOKENS))]
        walls += time.perf_counter() - began
        firsts += frames[0] - began
    with pytest.raises(InferenceServerException):
        list(client.stream(MODEL, _request([1, 9000], 4)))

    def grown(name: str) -> float:
        return metrics(server).get(name, 0.0) - before.get(name, 0.0)

    until(lambda: grown("slipway_requests_refused_total invalid") == 1, "the refusal")
    until(lambda: grown("slipway_requests_total completed") == rounds, "the completed requests")
    until(lambda: grown("slipway_generated_tokens_total") >= rounds * NEW_TOKENS, "the tokens")
    assert grown("slipway_generated_tokens_total") == rounds * NEW_TOKENS
    assert grown("slipway_prompt_tokens_total") == rounds * 2
    # Its clock starts after the client's and stops before it.
    assert grown("slipway_request_duration_seconds_count") == rounds
    duration = grown("slipway_request_duration_seconds_sum")
    assert grown("slipway_time_to_first_token_seconds_count") == rounds
    first = grown("slipway_time_to_first_token_seconds_sum")
    between = grown("slipway_time_between_tokens_seconds_sum") * (NEW_TOKENS - 1)
    assert 0 < first < firsts
    assert first < first + between < duration < walls
    assert grown('slipway_request_duration_seconds_bucket le="+Inf"') == rounds
    request_us = grown("nv_inference_request_duration_us 1")
    assert duration <= request_us / 1e6 + 2e-6 < walls


def settled_metrics(server: ModelServer) -> dict[str, float]:
    """Return the metrics once they no longer change: what came before is reported."""
    last: dict[str, float] = {}
    while last != (found := metrics(server)):
        last = found
        time.sleep(1.5)  # three times as long as between two reports
    return found


def metrics(server: ModelServer) -> dict[str, float]:
    """Return the model's metrics by name and, where they have one, by a further label."""
    with urllib.request.urlopen(
        f"http://{server.address('metrics')}/metrics", timeout=10
    ) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if (match := _METRIC.fullmatch(line)) is not None:
            further = [each for each in match["labels"].split(",") if not each.startswith("model=")]
            values = [each.partition("=")[2].strip('"') for each in further if each[:3] != "le="]
            values += [each for each in further if each[:3] == "le="]
            found[" ".join([match["name"], *values])] = float(match["value"])
    return found


def test_streaming_commands_work_against_the_server(
    server,
    greedy_cases,
    capsys,
    tmp_path,
):
    case, url = greedy_cases[0], ["--url", server.address("grpc")]
    assert main(["stream", case["prompt"], "-o", str(NEW_TOKENS), *url]) == 0
    assert capsys.readouterr().out == case["greedy_text"] + "\n"
    assert main(["generate", case["prompt"], "-o", str(NEW_TOKENS), *url]) == 0
    assert capsys.readouterr().out == case["greedy_text"] + "\n"
    ids = case["input_ids"]
    request = f"""{{
        "config": {{"stream_api": true}},
        "request": [
            {{"name": "input_ids", "data": [{ids}], "dtype": "uint32"}},
            {{"name": "input_lengths", "data": [[{len(ids)}]], "dtype": "uint32"}},
            {{"name": "request_output_len", "data": [[3]], "dtype": "uint32"}},
            {{"name": "is_return_log_probs", "data": [[true]], "dtype": "bool"}}
        ]
    }}"""
    (tmp_path / "request.json").write_text(request)
    assert main(["request", str(tmp_path / "request.json"), *url]) == 0
    output = capsys.readouterr().out
    assert output.count("Partial result (probability ") == 3
