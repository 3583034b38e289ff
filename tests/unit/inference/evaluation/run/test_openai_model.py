"""Models at servers of OpenAI's protocol that differ in what they answer."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference.evaluation.openai_client import OpenAIClient, base_url
from inference.evaluation.options import EvaluationOptions, LatencyOptions
from inference.evaluation.record import RunFacts
from inference.evaluation.run import (
    openai_model,
    served_model,  # noqa: F401 - imports the loader of tokenizers before `server` replaces it
)
from inference.evaluation.run.evaluator import evaluate
from inference.evaluation.run.openai_model import open_model
from inference.evaluation.task import EvaluationError, RequestFailedError
from inference.front.access import Credentials

VOCABULARY = 26


class Letters:
    """One token for each letter; a space is the token 26."""

    def encode(self, text: str) -> list[int]:
        return [26 if c == " " else (ord(c.lower()) - 97) % VOCABULARY for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(" " if i == 26 else chr(97 + i) for i in ids)


def following(ids: list[int], count: int) -> list[int]:
    """Return what the fake model says: the alphabet, from the last letter on."""
    return [(ids[-1] + 1 + i) % VOCABULARY for i in range(count)]


class Server(ThreadingHTTPServer):
    abilities: frozenset[str] = frozenset()
    requests: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        if "nesting" in self.server.abilities:
            data = b"[" * 100_000
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(
            200, {"data": [{"id": "alphabet"}] * (1 + ("several" in self.server.abilities))}
        )

    def do_POST(self) -> None:
        able = self.server.abilities
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body | {"token": self.headers.get("authorization")})
        if "return_token_ids" in body and "ids" not in able:
            return self.answer(422, {"detail": "Unexpected fields"})
        prompt = body["prompt"]
        if not isinstance(prompt, str) and "ids" not in able:
            return self.answer(400, {"detail": "prompt must be a string."})
        ids = Letters().encode(prompt) if isinstance(prompt, str) else prompt
        tokens = following(ids, body["max_tokens"])
        if body.get("stream"):
            return self.stream(tokens)
        choice: dict[str, Any] = {"text": Letters().decode(tokens)}
        if "return_token_ids" in body:
            choice["token_ids"] = tokens
        if body.get("echo") and "echo" in able:
            score = -(10**400) if "endless" in able else -0.5
            choice["logprobs"] = {"token_logprobs": [None, *[score] * (len(ids) - 1 + len(tokens))]}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return self.answer(200, {"choices": [choice], "usage": usage})

    def stream(self, tokens: list[int]) -> None:
        self.send_response(200)
        self.end_headers()
        if "endless" in self.server.abilities:
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b": still here\n")
        for token in tokens:
            event = {"choices": [{"text": Letters().decode([token]), "token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("inference.backend.tokenizer.load_tokenizer", lambda _: Letters())
    found = Server(("127.0.0.1", 0), Handler)
    found.requests = []
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def options(server: Server, tmp_path: Path, **changes: Any) -> EvaluationOptions:
    data = tmp_path / "passages.jsonl"
    data.write_text('{"text": "ab cd"}\n{"text": "xa b"}\n')
    found = EvaluationOptions(
        name="x",
        time_limit="1",
        output_dir=str(tmp_path / "report"),
        data_dir=tmp_path,
        url=f"127.0.0.1:{server.server_address[1]}",
        protocol="openai",
        tokenizer_dir=tmp_path,
        latency=LatencyOptions(enabled=False),
    )
    found.lambada.data_path = str(data)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


FULL = frozenset({"ids", "echo"})


def test_a_server_of_every_ability_is_asked_by_token_ids(server: Server, tmp_path: Path) -> None:
    server.abilities = FULL
    token = tmp_path / "token"
    token.write_text("secret" * 6 + "\n")
    token.chmod(0o600)
    model = open_model(options(server, tmp_path, token_file=str(token)))
    assert list(model.lacks) == ["tensors"]
    assert model.streams
    assert model.complete_ids([3], output_len=2) == (4, 5)
    assert model.complete_text("abc", output_len=2).text == "de"
    assert math.isclose(model.context_log_prob([1, 2, 3]), -1.0)
    arrivals: list[int] = []
    answer = model.complete_rows([[0]], output_len=3, each_frame=lambda: arrivals.append(1))
    assert (answer, len(arrivals)) == ([(1, 2, 3)], 3)
    assert {each["token"] for each in server.requests} == {"Bearer " + "secret" * 6}
    assert all(each["temperature"] == 0 for each in server.requests)


def test_parameters_that_are_ignored_or_refused_are_noticed(server: Server, tmp_path: Path) -> None:
    model = open_model(options(server, tmp_path))
    assert set(model.lacks) == {"tensors", "token ids", "log probabilities"}
    assert model.complete_text("abc", output_len=2).text == "de"
    assert model.complete_rows([[0, 1]], output_len=3) == [(openai_model.UNKNOWN_TOKEN,) * 3]
    with pytest.raises(RequestFailedError, match=r"no log probabilities|prompt must be"):
        model.context_log_prob([1, 2])
    server.abilities = frozenset({"ids"})
    assert set(open_model(options(server, tmp_path)).lacks) == {"tensors", "log probabilities"}


def test_metrics_that_a_server_cannot_answer_are_left_out_by_name(
    server: Server, tmp_path: Path
) -> None:
    asked = options(server, tmp_path, tasks=["lambada", "end_to_end"])
    report = evaluate(asked, RunFacts(name="x"))
    (task,) = report.tasks
    assert [metric.name for metric in task.metrics] == ["lambada_last_word"]
    assert "reads as that word" in task.metrics[0].method
    assert "lambada_perplexity is left out: the server returns no log prob" in task.note
    assert "end_to_end_agreement is left out: the protocol has no tensors" in task.note
    server.abilities = FULL
    report = evaluate(asked, RunFacts(name="x"))
    assert [metric.name for metric in report.tasks[0].metrics] == [*asked.lambada.metrics]
    assert "lambada" not in report.tasks[0].note


def test_a_bound_on_what_is_left_out_ends_the_evaluation(server: Server, tmp_path: Path) -> None:
    asked = options(server, tmp_path, gate={"lambada_perplexity": {"max": 9}})
    with pytest.raises(EvaluationError, match=r"gate.lambada_perplexity bounds what the server"):
        evaluate(asked, RunFacts(name="x"))
    with pytest.raises(EvaluationError, match=r"nothing that evaluate.tasks asks for"):
        evaluate(options(server, tmp_path, tasks=["end_to_end"]), RunFacts(name="x"))


def test_latency_has_the_times_of_first_and_further_tokens(server: Server, tmp_path: Path) -> None:
    latency = LatencyOptions(shapes=["2+4"], concurrencies=[2], requests=4)
    report = evaluate(options(server, tmp_path, latency=latency), RunFacts(name="x"))
    (point,) = report.latency
    assert (point.streamed, point.generated) == (True, 16)
    assert point.first_token_ms is not None
    assert point.per_token_ms is not None


def test_what_cannot_be_asked_is_said_by_name(server: Server, tmp_path: Path) -> None:
    server.abilities = FULL | {"several"}
    with pytest.raises(EvaluationError, match=r"serves alphabet, alphabet; name the one .*model"):
        open_model(options(server, tmp_path))
    assert open_model(options(server, tmp_path, model="alphabet"))
    with pytest.raises(EvaluationError, match=r"evaluate\.tokenizer"):
        open_model(options(server, tmp_path, tokenizer_dir=None))
    with pytest.raises(EvaluationError, match="no server of OpenAI's protocol completes text"):
        open_model(options(server, tmp_path, url="127.0.0.1:1", model="x"))


@pytest.mark.parametrize("listed", [None, 3, {"data": 3}, {"data": [3]}])
def test_a_list_of_models_that_is_none_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: Any
) -> None:
    monkeypatch.setattr(OpenAIClient, "get", lambda *_: listed)
    with pytest.raises(EvaluationError, match="serves no model that it lists; name the one"):
        open_model(options(server, tmp_path))


def test_an_answer_nested_without_end_is_a_failed_request(server: Server, tmp_path: Path) -> None:
    server.abilities = frozenset({"nesting"})
    with pytest.raises(EvaluationError, match=r"completes text at .*RecursionError"):
        open_model(options(server, tmp_path, model="x"))


def test_a_stream_without_end_is_a_failed_request(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.evaluation.openai_client._MOST_BYTES", 100_000)
    server.abilities = FULL | {"endless"}
    model = open_model(options(server, tmp_path, model="x"))
    assert not model.streams
    assert not model.scores  # no double holds them
    client = OpenAIClient(f"127.0.0.1:{server.server_address[1]}", Credentials(), timeout_s=5)
    with pytest.raises(RequestFailedError, match="an answer of more than 100000 bytes"):
        list(client.stream({"model": "x", "prompt": "a", "max_tokens": 1}))
    assert model.complete_text("abc", output_len=2).text == "de"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("node1:8000", "https://node1:8000/v1"),
        ("http://node1:8000", "http://node1:8000/v1"),
        ("https://node1/deep/v1/", "https://node1/deep/v1"),
        ("[::1]:80", "https://[::1]:80/v1"),
    ],
)
def test_addresses_become_base_urls(text: str, url: str) -> None:
    assert base_url(text, uses_tls=True) == url


@pytest.mark.parametrize("text", ["ftp://a", "http://", "http://u:p@a", "a:99999", "file:///etc"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - by urllib itself, too
        base_url(text, uses_tls=False)
