"""Tasks of lm-evaluation-harness, with a stand-in of the package that records what it is asked."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inference.evaluation.bounds import parse_bounds
from inference.evaluation.options import (
    EvaluationOptions,
    HarnessOptions,
    OpenAIClientOptions,
)
from inference.evaluation.run.checks import check_evaluation
from inference.evaluation.run.preparation import check_bounds_of_groups, prepare_task
from inference.evaluation.run.task_run import run_task
from inference.evaluation.task import EvaluationError
from inference.evaluation.tasks.harness import HarnessTask
from tests.fake_model import FakeModel


class _Task:
    """A task with two documents, an accuracy by two filters, and a perplexity."""

    eval_docs = ({"q": 1}, {"q": 2}, {"q": 3})
    _filters = (SimpleNamespace(name="none"), SimpleNamespace(name="strict-match"))

    def aggregation(self) -> dict[str, Any]:
        own = SimpleNamespace(__module__="lm_eval.api.metrics")
        return {"acc": own, "perplexity": own}

    def higher_is_better(self) -> dict[str, bool]:
        return {"acc": True, "perplexity": False}


class _Manager:
    def __init__(self, include_path: str | None = None) -> None:
        self.include_path = include_path

    def load(self, names: list[str]) -> dict[str, Any]:
        if names != ["two-facts"]:
            raise KeyError(names[0])
        return {"tasks": {"two-facts": _Task()}}


@pytest.fixture
def asked(monkeypatch) -> list[dict[str, Any]]:
    """Put the stand-in in the place of lm_eval; return what its evaluations were asked."""
    calls: list[dict[str, Any]] = []

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        figures = {"alias": "two-facts"}
        for key, value, error in (("acc", 0.5, 0.1), ("perplexity", 7.0, "N/A")):
            for pipeline in ("none", "strict-match"):
                figures |= {f"{key},{pipeline}": value, f"{key}_stderr,{pipeline}": error}  # type: ignore[dict-item]
        counts = {"two-facts": {"original": 3, "effective": 2}}
        return {"results": {"two-facts": figures}, "n-samples": counts}

    class Asked:
        """A model of the harness, which remembers its arguments and reads nothing of answers."""

        _seed = 1

        def __init__(self, **arguments: Any) -> None:
            self.arguments = arguments

        def create_message(self, messages: Any) -> Any:
            return messages

        def _create_payload(self, messages: Any, **_: Any) -> dict[str, Any]:
            name = (
                "messages" if self.arguments["base_url"].endswith("/chat/completions") else "prompt"
            )
            return {"model": self.arguments["model"], name: messages, "max_tokens": 1}

        def parse_generations(self, outputs: Any) -> list[str]:
            return [each["text"] for each in outputs["choices"]]

    models = ModuleType("lm_eval.models.openai_completions")
    models.LocalCompletionsAPI = models.LocalChatCompletion = Asked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval.models", ModuleType("lm_eval.models"))
    monkeypatch.setitem(sys.modules, models.__name__, models)
    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    package.__spec__ = SimpleNamespace(name="lm_eval")  # type: ignore[assignment]
    tasks.TaskManager = _Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr("inference.evaluation.tasks.harness.version", lambda _: "0.0")
    return calls


class Endpoint(ThreadingHTTPServer):
    """Describes its model, and answers each request by `reply` after one of `statuses`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.listed: Any = {"data": [{"id": "fastertransformer", "max_model_len": 512}]}
        self.reply: Any = {"choices": [{"text": "x", "finish_reason": "stop"}]}
        self.has_tokenizer = False
        self.refuses: tuple[str, ...] = ()
        self.statuses: list[int] = []
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.answer(200, self.server.listed)
        return self.answer(200 if self.server.has_tokenizer else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if any(name in body for name in self.server.refuses):
            return self.answer(400, {})
        if self.server.statuses and (status := self.server.statuses.pop()) != 200:
            return self.answer(status, {})
        prompt = body.get("prompt")
        several = isinstance(prompt, list) and isinstance(prompt[0], str)
        choices = self.server.reply["choices"] * (len(prompt) if several else 1)
        return self.answer(200, {"choices": choices})

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def server() -> Iterator[Endpoint]:
    found = Endpoint()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def endpoint(server: Endpoint) -> str:
    return server.url


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def options(**changes: Any) -> EvaluationOptions:
    values = {"output_dir": Path("out"), "data_dir": Path("data"), "tasks": ["harness:two-facts"]}
    return EvaluationOptions(**{**values, **changes})


def test_figures_of_the_harness_become_metrics(asked, endpoint):
    token = HarnessOptions(num_fewshot=2, batch_size=4)
    own = options(openai_url=endpoint, limit=2, harness=token, concurrency=3)
    assert not [*check_evaluation(own)]
    prepared = prepare_task(HarnessTask("harness:two-facts", own))
    assert (prepared.dataset.total, prepared.dataset.count, prepared.dataset.limit) == (3, 2, 2)
    run = run_task(prepared, FakeModel({}), concurrency=4)
    (call,) = asked
    assert (call["tasks"], call["limit"]) == (["two-facts"], 2)
    assert call["num_fewshot"] == 2
    given = call["model"].arguments
    assert given["batch_size"] == 4
    assert given["base_url"] == f"{endpoint}/completions"
    assert (given["model"], given["max_length"], given["num_concurrent"]) == (
        ("fastertransformer", 512, 3)
    )
    metrics = {metric.name: metric for metric in run.report.metrics}
    assert set(metrics) == {
        "harness_two_facts_acc",
        "harness_two_facts_acc_strict_match",
        "harness_two_facts_perplexity",
        "harness_two_facts_perplexity_strict_match",
    }
    accuracy, perplexity = (metrics[f"harness_two_facts_{key}"] for key in ("acc", "perplexity"))
    assert (accuracy.value, accuracy.stderr, accuracy.count) == (0.5, 0.1, 2)
    assert accuracy.higher_is_better
    assert (perplexity.value, perplexity.stderr) == (7.0, 0.0)
    assert not perplexity.higher_is_better
    assert [each.answer for each in run.predictions] == ["0.5", "0.5", "7", "7"]


@pytest.mark.parametrize("higher", [{}, {"acc": None, "perplexity": None}])
def test_a_tasks_own_aggregation_has_no_known_unit(higher, asked, endpoint, monkeypatch):
    monkeypatch.setattr(
        _Task, "aggregation", lambda _: dict.fromkeys(["acc", "perplexity"], partial(sum))
    )
    monkeypatch.setattr(_Task, "higher_is_better", lambda _: higher)
    run = run_task(
        prepare_task(HarnessTask("harness:two-facts", options(openai_url=endpoint))),
        FakeModel({}),
        concurrency=1,
    )
    assert {(each.unit, each.higher_is_better) for each in run.report.metrics} == {("", True)}


def test_the_gate_knows_the_metrics_once_the_task_is_loaded(asked, endpoint):
    gate = {"harness_two_facts_acc": {"min": 0.4}, "harness_two_facts_bleu": {"min": 1}}
    own = options(openai_url=endpoint, gate=gate)
    assert not [*check_evaluation(own)]
    prepared = [prepare_task(HarnessTask("harness:two-facts", own))]
    (problem,) = check_bounds_of_groups(parse_bounds(gate)[0], prepared)
    assert "harness_two_facts_bleu" in problem
    assert "harness_two_facts_perplexity" in problem
    assert not asked


def test_an_unknown_task_of_the_harness_is_reported(asked, endpoint):
    own = options(openai_url=endpoint, tasks=["harness:nothing"])
    with pytest.raises(ValueError, match="harness:nothing cannot be loaded by lm_eval"):
        prepare_task(HarnessTask("harness:nothing", own))
    assert not asked


def test_an_endpoint_that_does_not_answer_is_named(asked):
    prepared = prepare_task(
        HarnessTask("harness:two-facts", options(openai_url="http://127.0.0.1:1/v1"))
    )
    with pytest.raises(EvaluationError, match=r"127\.0\.0\.1:1/v1/models.*refused"):
        run_task(prepared, FakeModel({}), concurrency=1)
    assert not asked


def arguments(server: Endpoint, **changes: Any) -> dict[str, Any]:
    own = options(openai_url=server.url, tasks=["harness:two-facts"], **changes)
    return HarnessTask("harness:two-facts", own)._model_arguments()


def test_an_endpoint_that_does_not_say_how_long_its_context_is_is_named(server):
    server.listed = {"data": [{"id": "fastertransformer"}]}
    with pytest.raises(EvaluationError, match=r"max_model_len of fastert.*harness\.max_length"):
        arguments(server)
    assert arguments(server, harness=HarnessOptions(max_length=99))["max_length"] == 99


def test_another_engine_is_asked_by_its_own_name(server, tmp_path):
    """vLLM lists its models, and has /tokenizer_info only where that is switched on."""
    server.listed = {"data": [{"id": "tiny", "max_model_len": 256}, {"id": "tiny-lora"}]}
    given = arguments(server, protocol="openai", model="tiny", tokenizer=tmp_path)
    assert (given["model"], given["max_length"]) == ("tiny", 256)
    assert (given["tokenizer_backend"], given["tokenizer"]) == ("huggingface", str(tmp_path))
    assert given["tokenized_requests"]
    server.refuses = ("prompt",)  # as a server of text alone refuses token ids
    given = arguments(server, protocol="openai", model="tiny", tokenizer=tmp_path)
    assert not given["tokenized_requests"]
    assert given["batch_size"] == 1
    assert arguments(server, protocol="openai", model="tiny")["tokenizer_backend"] is None
    server.has_tokenizer = True
    for folder in (None, tmp_path):
        given = arguments(server, protocol="openai", model="tiny", tokenizer=folder)
        assert given["tokenizer_backend"] == "remote"
    for name in ("other", None):
        with pytest.raises(EvaluationError, match=r"lists tiny, tiny-lora, .*evaluate\.model"):
            arguments(server, protocol="openai", model=name)


def test_a_chat_is_asked_one_message_at_a_time(server):
    given = arguments(server, openai=OpenAIClientOptions(chat=True))
    assert given["base_url"] == f"{server.url}/chat/completions"
    assert given["batch_size"] == 1
    assert "tokenizer_backend" not in given


@pytest.mark.parametrize("chat", [False, True])
def test_the_requests_of_the_harness_are_sent_by_our_client(asked, server, monkeypatch, chat):
    found = []

    def simple_evaluate(model: Any, **_: Any) -> None:
        server.statuses = [503]
        call = model.amodel_call(None, None, ["a"], generate=True)
        found.append(asyncio.run(call))
        raise TypeError("the rest is the harness's own")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate)
    server.refuses = ("frequency_penalty",)
    own = options(openai_url=server.url, openai=OpenAIClientOptions(chat=chat))
    task = HarnessTask("harness:two-facts", own)
    task.prepare()
    with pytest.raises(EvaluationError, match="the rest"):
        task.start()
    assert found == [["x"]]
    assert server.bodies[-1]["repetition_penalty"] == 1
    assert "frequency_penalty" not in server.bodies[-1]
    counts = task.tally.counts()
    assert counts["retried"] == 1
    server.reply = {"choices": [{"text": "", "finish_reason": None}]}
    with pytest.raises(EvaluationError, match="finish_reason null is not the end of an answer"):
        task.start()


def test_a_run_of_the_harness_goes_on_where_one_ended(asked, server, monkeypatch):
    prompts = [f"question {number}" for number in (*range(9), 8)]  # the last one twice

    def simple_evaluate(model: Any, **_: Any) -> None:
        for prompt in prompts[:ends]:
            asyncio.run(model.amodel_call(None, None, [prompt], generate=True))
        raise TypeError("the server went away")

    def sent() -> tuple[list[str], HarnessTask]:
        server.bodies.clear()
        task = HarnessTask("harness:two-facts", options(openai_url=server.url))
        task.prepare()
        with pytest.raises(EvaluationError, match="went away"):
            task.start()
        questions = [body["prompt"][0] for body in server.bodies]
        return [each for each in questions if each in prompts], task

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate)
    ends = 8
    assert sent()[0] == prompts[:8]
    ends = len(prompts)
    again, task = sent()
    assert again == [*prompts[:4], *prompts[8:]]  # some as a check, and those that are left
    assert task.reused == 4
    assert task.tally.counts()["stop"] == len(prompts)
    assert sent()[0] == prompts[:4]
    server.reply = {"choices": [{"text": "of another model", "finish_reason": "stop"}]}
    assert sent()[0] == prompts


def test_a_harness_that_fails_is_named_and_not_run_again(asked, endpoint, monkeypatch):
    def simple_evaluate(**arguments: Any) -> None:
        asked.append(arguments)
        raise TypeError("the endpoint ended the connection")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate)
    prepared = prepare_task(HarnessTask("harness:two-facts", options(openai_url=endpoint)))
    with pytest.raises(EvaluationError, match=r"lm_eval.*endpoint ended the connection"):
        run_task(prepared, FakeModel({}), concurrency=2)
    assert len(asked) == 1


def test_what_is_missing_is_reported_before_the_start(monkeypatch):
    monkeypatch.setattr("inference.evaluation.tasks.harness.find_spec", lambda _: None)
    missing = options(harness=HarnessOptions(include_path=Path("/nowhere")))
    found = [*check_evaluation(missing)]
    assert any("pip install 'lm_eval[api]'" in problem for problem in found)
    assert any("deploy.openai.enabled=true" in problem for problem in found)
    assert any("evaluate.harness.include_path=/nowhere" in problem for problem in found)
