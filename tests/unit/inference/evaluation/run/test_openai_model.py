"""Models at servers of OpenAI's protocol that differ in what they answer."""

import contextlib
import email.utils
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference.evaluation import openai_client
from inference.evaluation.openai_client import OpenAIClient, base_url, seconds_of
from inference.evaluation.options import (
    EvaluationOptions,
    LatencyOptions,
    OpenAIClientOptions,
)
from inference.evaluation.record import RunFacts
from inference.evaluation.run import (
    openai_model,
    served_model,  # noqa: F401 - imports the loader of tokenizers before `server` replaces it
)
from inference.evaluation.run.evaluator import evaluate
from inference.evaluation.run.latency import measure_latency
from inference.evaluation.run.openai_model import _listed, open_model
from inference.evaluation.run.timing import RequestTimer
from inference.evaluation.task import (
    EvaluationError,
    ImplausibleAnswerError,
    RequestFailedError,
)
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
    """Answers by its abilities, after one of `faults` a request: a status or finish reason."""

    abilities: frozenset[str] = frozenset()
    requests: list[dict[str, Any]]
    faults: list[tuple[Any, dict[str, Any]]]


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

    def fail(self, fault: Any, more: dict[str, Any]) -> None:
        if fault == "cut":
            self.send_response(200)
            self.send_header("content-length", "100")
            self.end_headers()
            self.wfile.write(b"{")
        elif fault == "done":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"data: [DONE]\n\n")
        elif isinstance(fault, int):
            self.send_response(fault)
            for name, value in more.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()
        else:
            choice = {"text": "", "finish_reason": fault, **more}
            self.answer(200, {"choices": [choice], "usage": {"prompt_tokens": 1}})

    def do_GET(self) -> None:
        self.answer(
            200, {"data": [{"id": "alphabet"}] * (1 + ("several" in self.server.abilities))}
        )

    def do_POST(self) -> None:
        able = self.server.abilities
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(body | {"token": self.headers.get("authorization")})
        if self.server.faults:
            return self.fail(*self.server.faults.pop(0))
        if "busy" in able and body.get("prompt") == "xa":
            self.server.abilities = able - {"busy"}
            return self.fail(503, {"retry-after": "0"})
        if "return_token_ids" in body and "ids" not in able:
            return self.answer(422, {"detail": "Unexpected fields"})
        if "return_token_ids" in body and "refuses_ids" in able:
            return self.answer(422, {"detail": "Unexpected fields"})
        chats = self.path.endswith("/chat/completions")
        prompt = body["messages"][0]["content"] if chats else body["prompt"]
        if not isinstance(prompt, str) and "ids" not in able:
            return self.answer(400, {"detail": "prompt must be a string."})
        ids = Letters().encode(prompt) if isinstance(prompt, str) else prompt
        tokens = following(ids, body["max_tokens"])
        if "penalty" in able and "repetition_penalty" not in body:
            tokens = tokens[::-1]
        if body.get("stream"):
            return self.stream(tokens, chats=chats)
        text = Letters().decode(tokens)
        choice: dict[str, Any] = {"text": text, "finish_reason": "length"}
        if chats:
            choice = {"message": {"content": text}, "finish_reason": "length"}
        if "return_token_ids" in body:
            choice["token_ids"] = tokens
        if body.get("echo") and "echo" in able:
            score = -(10**400) if "endless" in able else -0.5
            choice["logprobs"] = {"token_logprobs": [None, *[score] * (len(ids) - 1 + len(tokens))]}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens)}
        return self.answer(200, {"choices": [choice], "usage": usage})

    def stream(self, tokens: list[int], *, chats: bool) -> None:
        self.send_response(200)
        self.end_headers()
        if "endless" in self.server.abilities:
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b": still here\n")
        for token in tokens:
            text = Letters().decode([token])
            choice: dict[str, Any] = {"text": text, "token_ids": [token]}
            if chats:
                choice = {"delta": {"content": text}}
            if token == tokens[-1]:
                choice["finish_reason"] = "length"
            event = {"choices": [choice]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr("inference.backend.tokenizer.load_tokenizer", lambda _: Letters())
    found = Server(("127.0.0.1", 0), Handler)
    found.requests, found.faults = [], []
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
        output_dir=tmp_path / "report",
        data_dir=tmp_path,
        url=f"127.0.0.1:{server.server_address[1]}",
        protocol="openai",
        tokenizer_dir=tmp_path,
        latency=LatencyOptions(enabled=False),
    )
    found.lambada.data_path = data
    return replace(found, **changes)


FULL = frozenset({"ids", "echo"})


def test_a_server_of_every_ability_is_asked_by_token_ids(server, tmp_path):
    server.abilities = FULL
    token = tmp_path / "token"
    token.write_text("secret" * 6 + "\n")
    token.chmod(0o600)
    model = open_model(options(server, tmp_path, token_file=token))
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


def test_parameters_that_are_ignored_or_refused_are_noticed(server, tmp_path):
    model = open_model(options(server, tmp_path))
    assert set(model.lacks) == {"tensors", "token ids", "log probabilities"}
    assert model.complete_text("abc", output_len=2).text == "de"
    assert model.complete_rows([[0, 1]], output_len=3) == [(openai_model.UNKNOWN_TOKEN,) * 3]
    with pytest.raises(RequestFailedError, match=r"no log probabilities|prompt must be"):
        model.context_log_prob([1, 2])
    server.abilities = frozenset({"ids"})
    assert set(open_model(options(server, tmp_path)).lacks) == {"tensors", "log probabilities"}


def test_metrics_that_a_server_cannot_answer_are_left_out_by_name(server, tmp_path):
    asked = options(server, tmp_path)
    report = evaluate(asked, RunFacts(name="x"))
    (task,) = report.tasks
    assert [metric.name for metric in task.metrics] == ["lambada_last_word"]
    assert "reads as that word" in task.metrics[0].method
    assert "lambada_perplexity is left out: the server returns no log prob" in task.note
    server.abilities = FULL
    report = evaluate(asked, RunFacts(name="x"))
    assert [metric.name for metric in report.tasks[0].metrics] == [*asked.lambada.metrics]
    assert "lambada" not in report.tasks[0].note


def test_a_bound_on_what_is_left_out_ends_the_evaluation(server, tmp_path):
    asked = options(server, tmp_path, gate={"lambada_perplexity": {"max": 9}})
    with pytest.raises(EvaluationError, match=r"gate.lambada_perplexity is on a metric that"):
        evaluate(asked, RunFacts(name="x"))
    asked = replace(asked, gate={}, lambada=replace(asked.lambada, metrics=["lambada_perplexity"]))
    with pytest.raises(EvaluationError, match=r"nothing that evaluate.tasks asks for"):
        evaluate(asked, RunFacts(name="x"))


def test_latency_has_the_times_of_first_and_further_tokens(server, tmp_path):
    latency = LatencyOptions(shapes=["2+4"], concurrencies=[2], requests=4)
    report = evaluate(options(server, tmp_path, latency=latency), RunFacts(name="x"))
    (point,) = report.latency
    assert (point.streamed, point.generated) == (True, 16)
    assert point.first_token_ms is not None
    assert point.per_token_ms is not None


def test_what_cannot_be_asked_is_said_by_name(server, tmp_path):
    server.abilities = FULL | {"several"}
    with pytest.raises(EvaluationError, match=r"lists alphabet, alphabet, and the option model"):
        open_model(options(server, tmp_path))
    assert open_model(options(server, tmp_path, model="alphabet"))
    with pytest.raises(EvaluationError, match=r"evaluate\.tokenizer"):
        open_model(options(server, tmp_path, tokenizer_dir=None))
    with pytest.raises(EvaluationError, match="no server of OpenAI's protocol completes text"):
        open_model(options(server, tmp_path, url="127.0.0.1:1", model="x"))


@pytest.mark.parametrize("listed", [None, 3, {"data": 3}, {"data": [3]}])
def test_a_list_of_models_that_is_none_is_said(server, tmp_path, monkeypatch, listed):
    monkeypatch.setattr(OpenAIClient, "get", lambda *_: listed)
    with pytest.raises(EvaluationError, match="lists no model, and the option model"):
        open_model(options(server, tmp_path))


def test_an_answer_nested_without_end_is_a_failed_request(server, tmp_path):
    server.abilities = frozenset({"nesting"})
    with pytest.raises(EvaluationError, match=r"completes text at .*RecursionError"):
        open_model(options(server, tmp_path, model="x"))


def test_a_stream_without_end_is_a_failed_request(server, tmp_path, monkeypatch):
    monkeypatch.setattr("inference.evaluation.openai_client._MAX_BYTES", 100_000)
    server.abilities = FULL | {"endless"}
    model = open_model(options(server, tmp_path, model="x"))
    assert not model.streams
    assert not model.scores  # no double holds them
    client = OpenAIClient(f"127.0.0.1:{server.server_address[1]}", Credentials(), timeout_s=5)
    with pytest.raises(RequestFailedError, match="an answer of more than 100000 bytes"):
        list(client.stream({"model": "x", "prompt": "a", "max_tokens": 1}))
    assert model.complete_text("abc", output_len=2).text == "de"


def timed(server: Server, tmp_path: Path, **changes: Any) -> Any:
    """Return a model as a task asks it."""
    asked = options(server, tmp_path, model="alphabet", **changes)
    return RequestTimer(open_model(asked), retry_s=asked.retry_s)


NO_ANSWERS = ["abort", None, "content_filter", "tool_calls", "cancelled", 3, "done"]


@pytest.mark.parametrize("reason", NO_ANSWERS)
def test_a_reply_that_is_no_answer_is_a_failed_request(server, tmp_path, reason):
    server.abilities = FULL
    model = timed(server, tmp_path, retry_s=0.0)
    server.faults = [(reason, {})] * 3
    with pytest.raises(RequestFailedError):
        model.complete_text("abc", output_len=2)
    with pytest.raises(RequestFailedError):
        model.complete_rows([[1]], output_len=2, each_frame=lambda: None)
    with pytest.raises(RequestFailedError):
        model.complete_rows([[1], [2]], output_len=2)
    assert model.counts() == {"stop": 0, "length": 0, "failed": 3, "retried": 0}


def test_ends_of_answers_are_counted(server, tmp_path):
    server.abilities = FULL
    model = timed(server, tmp_path)
    for reason in ("stop", "length", "eos_token"):
        server.faults = [(reason, {"token_ids": [1]})]
        model.complete_ids([1], output_len=2)
    assert model.counts() == {"stop": 2, "length": 1, "failed": 0, "retried": 0}


@pytest.mark.parametrize(
    "fault",
    [
        *((429, {}), (503, {}), (502, {}), (504, {}), ("cut", {}), ("abort", {})),
        (503, {"transfer-encoding": "chunked"}),  # its body is cut
    ],
)
def test_what_is_put_off_is_asked_again(server, tmp_path, fault):
    server.abilities = FULL
    model = timed(server, tmp_path)
    server.faults = [fault]
    assert model.complete_text("abc", output_len=2).text == "de"
    assert model.counts() == {"stop": 0, "length": 1, "failed": 0, "retried": 1}


@pytest.mark.parametrize("fault", [404, 405, 422, 501])
def test_what_a_server_does_not_implement_is_tried_and_done_without(server, tmp_path, fault):
    server.abilities = FULL
    client = OpenAIClient(
        f"127.0.0.1:{server.server_address[1]}", Credentials(), timeout_s=5, retry_s=0
    )
    server.faults = [(fault, {})]
    assert client.complete_or_none(client.greedy_request("tiny", "abc", 1)) is None


@pytest.mark.parametrize("fault", [400, 401, 403, 404, 500, 501])
def test_what_is_refused_is_not_asked_again(server, tmp_path, fault):
    server.abilities = FULL
    model = timed(server, tmp_path)
    server.faults = [(fault, {})]
    with pytest.raises(RequestFailedError, match=f": {fault}: "):
        model.complete_text("abc", output_len=2)


def test_the_server_says_how_long_to_wait(server, tmp_path, monkeypatch):
    server.abilities = FULL
    model = timed(server, tmp_path, retry_s=10.0)
    waits: list[float] = []
    monkeypatch.setattr("inference.evaluation.retry._interrupted.wait", waits.append)
    later = email.utils.formatdate(time.time() + 5, usegmt=True)
    server.faults = [(429, {"retry-after": "3"}), (503, {"retry-after": later}), (429, {})]
    assert model.complete_text("abc", output_len=2).text == "de"
    assert waits[0] == 3
    assert 0 < waits[1] <= 5
    assert 2 <= waits[2] <= 4  # the third without a word, later than the first would be
    server.faults = [(429, {"retry-after": "3600"})]
    with pytest.raises(RequestFailedError, match="Retry-After: 3600 s"):
        model.complete_text("abc", output_len=2)


@pytest.mark.parametrize(
    ("header", "seconds"), [("2", 2.0), ("-1", 0.0), ("soon", None), ("nan", None), (None, None)]
)
def test_waits_are_numbers_or_dates(header, seconds):
    assert seconds_of(header) == seconds


def test_choices_come_in_any_order_and_none_is_missing(server, tmp_path):
    client = OpenAIClient(f"127.0.0.1:{server.server_address[1]}", Credentials(), timeout_s=5)
    choices = [{"index": at, "text": str(at), "finish_reason": "stop"} for at in (1, 0)]

    def given(found: Any) -> Any:
        return lambda *_: {"choices": found}

    client._json = given(choices)  # type: ignore[method-assign]
    answer = client.complete({"prompt": ["a", "b"]})
    assert [each["text"] for each in answer["choices"]] == ["0", "1"]
    for wrong in ([], choices[:1], [*choices, *choices], None):
        client._json = given(wrong)  # type: ignore[method-assign]
        with pytest.raises(RequestFailedError, match="to 2 prompts"):
            client.complete({"prompt": ["a", "b"]})


def test_a_prompt_that_the_server_cuts_ends_the_run_by_name(server, tmp_path):
    server.abilities = FULL
    model = timed(server, tmp_path)
    server.faults = [("stop", {})]
    with pytest.raises(ImplausibleAnswerError, match="counts 1 tokens in prompts of 3"):
        model.complete_ids([1, 2, 3], output_len=2)
    server.abilities = frozenset()
    model = timed(server, tmp_path)
    server.faults = [("stop", {})]
    with pytest.raises(ImplausibleAnswerError, match="counts 1 tokens in prompts of 3"):
        model.complete_text("abc", output_len=2)


def test_a_reply_of_another_model_ends_the_run_by_name(server, tmp_path):
    model = timed(server, tmp_path)
    client = model._model.client
    answer = {"choices": [{"text": "ab", "finish_reason": "length"}]}
    client._answered_by = "one"
    client._json = lambda *_: {**answer, "model": "one", "system_fingerprint": "of a replica"}
    assert model.complete_text("abc", output_len=2).text == "ab"
    client._json = lambda *_: {**answer, "model": "another"}
    with pytest.raises(ImplausibleAnswerError, match="answers with model"):
        model.complete_text("abc", output_len=2)


def test_a_server_that_lists_another_model_at_the_end_is_found(server, tmp_path):
    model = open_model(options(server, tmp_path))
    model.check_unchanged()
    client: Any = model.client
    client.get = lambda _: {"data": [{"id": "alphabet", "root": "/after"}]}
    with pytest.raises(ImplausibleAnswerError, match="another model than at the start"):
        replace(model, listed={"id": "alphabet", "root": "/before"}).check_unchanged()


def test_a_router_that_loads_the_model_when_asked_serves_no_other(server, tmp_path):
    model = open_model(options(server, tmp_path))
    listed = {"id": model.model, "meta": {"size": 3}}  # which it knows of a loaded model alone
    states: Iterator[Any] = iter([{"status": "unloaded"}, {"status": "loaded", **listed}])
    client: Any = model.client
    client.get = lambda _: {"data": [{"id": model.model, **next(states)}]}
    replace(model, listed=_listed(model.client, model.model)).check_unchanged()


def test_a_server_that_ignores_the_length_of_an_answer_ends_the_run(server, tmp_path):
    model = timed(server, tmp_path)
    choice = {"text": "abcdefgh", "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 8}
    model._model.client._json = lambda *_: {"choices": [choice], "usage": usage}
    with pytest.raises(ImplausibleAnswerError, match="generated 8 tokens, more than max_tokens=2"):
        model.complete_text("abc", output_len=2)


def test_a_prompt_without_any_surprise_ends_the_run_by_name(server, tmp_path):
    server.abilities = FULL
    model = timed(server, tmp_path)
    scored = {"logprobs": {"token_logprobs": [None, *[0] * 9]}, "text": "ab"}
    model._model.client._json = lambda *_: {"choices": [{"finish_reason": "length", **scored}]}
    with pytest.raises(ImplausibleAnswerError, match="each of 9 tokens probability 1"):
        model.context_log_prob(range(10))


@pytest.mark.parametrize("score", [0.7, math.nan])
def test_a_probability_above_one_ends_the_run_by_name(server, tmp_path, score):
    server.abilities = FULL
    model = timed(server, tmp_path)
    scored = {"logprobs": {"token_logprobs": [None, score]}, "text": "ab"}
    choice = {"finish_reason": "length", **scored}
    model._model.client._json = lambda *_: {"choices": [choice]}
    with pytest.raises(ImplausibleAnswerError, match="as a token's log probability"):
        model.context_log_prob([1, 2])


def test_parameters_are_kept_that_change_the_answer(server, tmp_path):
    server.abilities = FULL | {"refuses_ids"}
    model = open_model(options(server, tmp_path, model="alphabet"))
    assert model.extras == openai_client.NEUTRAL
    server.abilities = FULL | {"penalty"}
    model = open_model(options(server, tmp_path, model="alphabet"))
    assert model.extras == {**openai_client.NEUTRAL, "return_token_ids": True}
    assert model.complete_text("abc", output_len=2).text == "de"


def test_prompts_are_messages_where_the_endpoint_is_a_chat(server, tmp_path):
    asked = options(server, tmp_path, model="alphabet", openai=OpenAIClientOptions(chat=True))
    model = open_model(asked)
    assert set(model.lacks) == {"tensors", "token ids", "log probabilities"}
    assert model.complete_text("abc", output_len=2).text == "de"
    arrivals: list[int] = []
    rows = model.complete_rows([[1]], output_len=3, each_frame=lambda: arrivals.append(1))
    assert (len(rows[0]), len(arrivals)) == (3, 3)
    assert len(model.complete_rows([[1], [2]], output_len=3)) == 2


def test_counts_stand_beside_the_figures(server, tmp_path):
    server.abilities = frozenset({"busy"})
    report = evaluate(options(server, tmp_path), RunFacts(name="x"))
    requests = report.tasks[0].requests
    assert (requests.stop, requests.length, requests.failed, requests.retried) == (0, 2, 0, 1)
    folder = tmp_path / "report"
    for name in ("report.md", "report.html", "junit.xml"):
        assert "0 stop, 2 length, 0 failed, 1 retried" in (folder / name).read_text(), name


def test_latency_is_that_of_the_request_that_was_answered(server, tmp_path):
    latency = LatencyOptions(
        shapes=["2+4"], concurrencies=[1], requests=2, warmup=0, max_point_s=60
    )
    asked = options(server, tmp_path, latency=latency)
    model = open_model(asked)
    server.faults = [(503, {"retry-after": "1"}), ("done", {})]
    (point,) = measure_latency(model, [[1, 2]], asked)
    assert (point.requests, model.tally.counts()["retried"]) == (2, 2)
    assert point.latency.max_ms < 1000  # without the second of the wait


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("node1:8000", "https://node1:8000/v1"),
        ("http://node1:8000", "http://node1:8000/v1"),
        ("https://node1/deep/v1/", "https://node1/deep/v1"),
        ("[::1]:80", "https://[::1]:80/v1"),
    ],
)
def test_addresses_become_base_urls(text, url):
    assert base_url(text, uses_tls=True) == url


@pytest.mark.parametrize("text", ["ftp://a", "http://", "http://u:p@a", "a:99999", "file:///etc"])
def test_other_addresses_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - by urllib itself, too
        base_url(text, uses_tls=False)


def test_a_probability_above_one_is_refused():
    class Model:
        def context_log_prob(self, ids: list[int]) -> float:
            return 0.4 * len(ids)

    timer: Any = RequestTimer(Model())  # type: ignore[arg-type]
    with pytest.raises(ImplausibleAnswerError, match=r"0\.4 as a log probability"):
        timer.context_log_prob([1])
