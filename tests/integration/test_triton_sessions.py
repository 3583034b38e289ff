"""Interactive sessions through a real tritonserver: many at once, streamed, refused, ended."""

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.decoding.rows import SessionTurn
from inference.server.client import TritonClient
from inference.server.server import ModelServer
from tests.contract import tensors_of
from tests.integration.triton_process import hosted
from tests.waiting import until

MODEL = "fastertransformer"
STREAMING = "streaming"
START_LIMIT_S = 120
SESSION_LEN = 200
SLOTS = 4


@pytest.fixture(scope="module")
def server(
    usual_host: str,
    sample_repository: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ModelServer]:
    """Return a server with one model for whole answers, and one of two instances for streams."""
    options: dict[str, Any] = {"interactive": True, "max_batch_size": 1}
    options["parameters"] = {"max_lanes": str(SLOTS)}
    repository = sample_repository(tp_size=1, **options)
    streaming = sample_repository(
        tp_size=1, decoupled=True, ensemble=False, instance_count=2, **options
    )
    text = (streaming / MODEL / "config.pbtxt").read_text()
    (streaming / MODEL / "config.pbtxt").write_text(text.replace(MODEL, STREAMING, 1))
    (streaming / MODEL).rename(repository / STREAMING)
    with hosted(usual_host, repository, tmp_path_factory.mktemp("log")) as running:
        running.start(timeout_s=START_LIMIT_S)
        yield running


def _request(*prompts: Sequence[int], new_tokens: int = 8, **options: Any) -> dict[str, Any]:
    """Return the tensors of a turn, every shape with a leading axis of size 1."""
    return {name: each[None] for name, each in tensors_of(prompts, new_tokens, **options).items()}


def _whole(outputs: dict[str, Any], row: int = 0) -> list[int]:
    """Return prompt and answer of a row, without what fills the row up."""
    tokens: list[int] = outputs["output_ids"][0, row, 0].tolist()
    return tokens


def _talk(client: TritonClient, session: int, turns: Sequence[Sequence[int]]) -> list[int]:
    """Hold a session and return its last output, the whole conversation."""
    shown: list[int] = []
    for number, prompt in enumerate(turns):
        turn = SessionTurn(session, starts=number == 0, ends=number == len(turns) - 1)
        shown = _whole(client.infer(MODEL, _request(prompt, session_len=SESSION_LEN), turn=turn))
    return shown


def test_concurrent_sessions_equal_single_requests(client, greedy_cases):
    prompts = [case["input_ids"] for case in greedy_cases]
    conversations = [[prompt[:1], prompt[1:2], prompt[-2:]] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        shown = list(pool.map(lambda i: _talk(client, 10 + i, conversations[i]), range(4)))
    for number, (first, second, third) in enumerate(conversations):
        whole: list[int] = []
        for prompt in (first, second, third):
            request = _request([*whole, *prompt], session_len=SESSION_LEN)
            turn = SessionTurn(50 + number, starts=True, ends=True)
            whole = _whole(client.infer(MODEL, request, turn=turn))
        assert shown[number] == whole
        assert len(whole) == len(first) + len(second) + len(third) + 3 * 8


def test_streamed_turns_end_in_the_answer_that_comes_whole(client, greedy_cases):
    prompt = greedy_cases[0]["input_ids"]
    expected = _talk(client, 20, [prompt[:4], prompt[4:6]])
    first = _request(prompt[:4], session_len=SESSION_LEN)
    list(client.stream(STREAMING, first, turn=SessionTurn(21, starts=True)))
    frames = list(client.stream(STREAMING, _request(prompt[4:6]), turn=SessionTurn(21, ends=True)))
    assert len(frames) == 8
    counts = [int(frame["sequence_length"][0, 0, 0]) for frame in frames]
    assert counts == list(range(len(expected) - 7, len(expected) + 1))
    assert _whole(frames[-1]) == expected


def test_instances_share_sessions_out_and_each_stays_where_it_began(server, client, greedy_cases):
    prompts = [case["input_ids"] for case in greedy_cases[:3]]
    sessions = range(100, 100 + 2 * len(prompts))

    def talk(session: int) -> list[int]:
        prompt, whole = prompts[session % len(prompts)], {"session_len": SESSION_LEN}
        first = SessionTurn(session, starts=True)
        list(client.stream(STREAMING, _request(prompt[:4], **whole), turn=first))
        started.wait(60)  # none ends before all have begun
        last = SessionTurn(session, ends=True)
        return _whole(list(client.stream(STREAMING, _request([7]), turn=last))[-1])

    started = threading.Barrier(len(sessions))
    before = _settled(server)
    with ThreadPoolExecutor(len(sessions)) as pool:
        shown = list(pool.map(talk, sessions))
    expected = [_talk(client, 110 + i, [prompt[:4], [7]]) for i, prompt in enumerate(prompts)]
    assert shown == [expected[session % len(prompts)] for session in sessions]

    served: dict[str, float] = {}

    def all_are_counted() -> bool:
        served.update({name: count - before[name] for name, count in _completed(server).items()})
        return sum(served.values()) == 2 * len(sessions)

    until(all_are_counted)
    assert served == {"0": len(sessions), "1": len(sessions)}


def _settled(server: ModelServer) -> dict[str, float]:
    """Return the answers, those of earlier tests among them: metrics come twice a second."""
    found: list[dict[str, float]] = [_completed(server)]

    def is_still() -> bool:
        time.sleep(1.2)
        found.append(_completed(server))
        return found[-1] == found[-2]

    until(is_still)
    return found[-1]


def _completed(server: ModelServer) -> dict[str, float]:
    """Return the answers of each instance of the model that streams."""
    with urllib.request.urlopen(f"http://{server.address('metrics')}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for labels, value in re.findall(r"^slipway_requests_total\{(.*)\} (.*)$", text, re.MULTILINE):
        each = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if (each["model"], each["outcome"]) == (STREAMING, "completed"):
            found[each["engine"]] = float(value)
    return found


def test_http_holds_sessions_too(server, client):
    with TritonClient(server.address("http"), protocol="http", timeout_s=240) as http:
        assert _talk(http, 30, [[5, 6, 7], [8]]) == _talk(client, 31, [[5, 6, 7], [8]])


def test_text_of_a_conversation_goes_through_the_ensemble(client):
    """Two turns of text give the tokens of the same two turns."""
    turns, shown = ("It was the best of times", ", said the old man"), b""
    for number, text in enumerate(turns):
        turn = SessionTurn(31, starts=number == 0, ends=number == 1)
        request = {
            "INPUT_0": np.array([[[text.encode()]]], object),
            "INPUT_1": np.array([[[6]]], np.uint32),
            "session_len": np.array([[[SESSION_LEN]]], np.uint32),
        }
        outputs = client.infer("ensemble", request, turn=turn)
        assert outputs["OUTPUT_0"].shape == (1, 1, 1)
        before, shown = shown, outputs["OUTPUT_0"][0, 0, 0]
        assert shown.startswith(before + text.encode())
    ids = [
        client.infer(
            "preprocessing",
            {
                "QUERY": np.array([[[text.encode()]]], object),
                "REQUEST_OUTPUT_LEN": np.array([[[6]]], np.uint32),
            },
        )["INPUT_ID"][0, 0].tolist()
        for text in turns
    ]
    tokens: list[int] = []
    for number, prompt in enumerate(ids):
        turn = SessionTurn(32, starts=number == 0, ends=number == 1)
        request = _request(prompt, new_tokens=6, session_len=SESSION_LEN)
        tokens = _whole(client.infer(MODEL, request, turn=turn))
    assert len(tokens) == len(ids[0]) + len(ids[1]) + 12
    decoded = client.infer("postprocessing", {"TOKENS_BATCH": np.array([[[tokens]]], np.uint32)})
    assert decoded["OUTPUT"][0, 0, 0] == shown
