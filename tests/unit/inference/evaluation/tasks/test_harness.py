"""Tasks of lm-evaluation-harness, with a stand-in of the package that records what it is asked."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inference.evaluation.bounds import parse_bounds
from inference.evaluation.openai_client import OpenAIClient
from inference.evaluation.options import EvaluationOptions, HarnessOptions
from inference.evaluation.record import Report, RequestStatistics
from inference.evaluation.report.files import render_html, render_markdown
from inference.evaluation.run.checks import check_evaluation
from inference.evaluation.run.preparation import check_bounds_of_groups, prepare
from inference.evaluation.run.task_run import run_task
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import EvaluationError, Metric
from inference.evaluation.tasks.harness import HarnessTask
from tests.fake_model import FakeModel


class _Task:
    """A task with two documents, an accuracy by two filters, and a perplexity."""

    eval_docs = ({"q": 1}, {"q": 2}, {"q": 3})
    _filters = (SimpleNamespace(name="none"), SimpleNamespace(name="strict-match"))

    def aggregation(self) -> dict[str, Any]:
        return {"acc": None, "perplexity": None}

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
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
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

    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    package.__spec__ = SimpleNamespace(name="lm_eval")  # type: ignore[assignment]
    tasks.TaskManager = _Manager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setattr("inference.evaluation.tasks.harness.version", lambda _: "0.0")
    return calls


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Return the base URL of an endpoint that describes its model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/v1/models/fastertransformer"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"max_model_len": 512}).encode())

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def options(**changes: Any) -> EvaluationOptions:
    values = {"output_dir": "out", "data_dir": Path("data"), "tasks": ["harness:two-facts"]}
    return EvaluationOptions(**{**values, **changes})


def test_figures_of_the_harness_become_metrics(asked: list[dict[str, Any]], endpoint: str) -> None:
    token = HarnessOptions(num_fewshot=2, batch_size=4)
    own = options(openai_url=endpoint, limit=2, harness=token, concurrency=3)
    assert check_evaluation(own) == []
    prepared = prepare(HarnessTask("harness:two-facts", own))
    assert (prepared.dataset.total, prepared.dataset.count, prepared.dataset.limit) == (3, 2, 2)
    run = run_task(prepared, FakeModel({}), concurrency=4)
    (call,) = asked
    assert (call["model"], call["tasks"], call["limit"]) == ("local-completions", ["two-facts"], 2)
    assert (call["num_fewshot"], call["batch_size"]) == (2, 4)
    given = call["model_args"]
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


def test_the_gate_knows_the_metrics_once_the_task_is_loaded(
    asked: list[dict[str, Any]], endpoint: str
) -> None:
    gate = {"harness_two_facts_acc": {"min": 0.4}, "harness_two_facts_bleu": {"min": 1}}
    own = options(openai_url=endpoint, gate=gate)
    assert check_evaluation(own) == []
    prepared = [prepare(HarnessTask("harness:two-facts", own))]
    (problem,) = check_bounds_of_groups(parse_bounds(gate)[0], prepared)
    assert "harness_two_facts_bleu" in problem
    assert "harness_two_facts_perplexity" in problem
    assert not asked


def test_an_unknown_task_of_the_harness_is_reported(
    asked: list[dict[str, Any]], endpoint: str
) -> None:
    own = options(openai_url=endpoint, tasks=["harness:nothing"])
    with pytest.raises(ValueError, match="harness:nothing cannot be loaded by lm_eval"):
        prepare(HarnessTask("harness:nothing", own))
    assert not asked


def test_an_endpoint_that_does_not_answer_is_named(asked: list[dict[str, Any]]) -> None:
    prepared = prepare(
        HarnessTask("harness:two-facts", options(openai_url="http://127.0.0.1:1/v1"))
    )
    with pytest.raises(EvaluationError, match=r"127\.0\.0\.1:1/v1/models/.*refused"):
        run_task(prepared, FakeModel({}), concurrency=1)
    assert not asked


def test_an_endpoint_that_does_not_say_how_long_its_context_is_is_named(
    asked: list[dict[str, Any]], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenAIClient, "get", lambda *_: {"id": "fastertransformer"})
    prepared = prepare(HarnessTask("harness:two-facts", options(openai_url=endpoint)))
    with pytest.raises(EvaluationError, match="fastertransformer states no number as max_model"):
        run_task(prepared, FakeModel({}), concurrency=1)
    assert not asked


def test_a_harness_that_fails_is_named_and_not_run_again(
    asked: list[dict[str, Any]], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simple_evaluate(**arguments: Any) -> None:
        asked.append(arguments)
        raise TypeError("the endpoint ended the connection")

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate)
    prepared = prepare(HarnessTask("harness:two-facts", options(openai_url=endpoint)))
    with pytest.raises(EvaluationError, match=r"lm_eval.*endpoint ended the connection"):
        run_task(prepared, FakeModel({}), concurrency=2)
    assert len(asked) == 1


def test_what_is_missing_is_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.evaluation.tasks.harness.find_spec", lambda _: None)
    found = check_evaluation(options(harness=HarnessOptions(include_path="/nowhere")))
    assert any("pip install 'lm_eval[api]'" in problem for problem in found)
    assert any("deploy.openai.enabled=true" in problem for problem in found)
    assert any("evaluate.harness.include_path=/nowhere" in problem for problem in found)


def test_a_task_that_sends_its_own_requests_has_a_page_without_charts_of_load(
    report: Report, make_metric: Callable[..., Metric]
) -> None:
    nothing = RequestStatistics(0, 32, 60.0, 0.0, distribution([]), 0.5, (0, 0))
    metrics = (
        make_metric("harness_x_acc", 0.0, stderr=0.0, low=0.0, high=0.0),
        make_metric("harness_x_perplexity", 1e9, stderr=1e8, low=8e8, high=1.2e9, unit=""),
    )
    own = replace(report.tasks[0], name="harness:x", metrics=metrics, requests=nothing)
    page = render_html(replace(report, tasks=(own,)), [])
    assert "Harness:x" in page
    assert "Latency under this load" not in page
    assert "Latency under this load" in render_html(report, [])
    assert "harness_x_perplexity" in render_markdown("report.md", replace(report, tasks=(own,)), ())
