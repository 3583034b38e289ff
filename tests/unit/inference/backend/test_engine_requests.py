"""Requests to a model with an engine: their responses, errors and ends, on both servers."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inference.backend.answering import ANSWERED, CANCEL, Answering, EngineRequest
from inference.backend.engine_model import EngineModel
from inference.backend.requests import InferRequest, ModelError, Outputs
from inference.backend.triton_model import TritonHost, TritonSender
from inference.engine.errors import EngineBusyError
from tests.waiting import until

REQUEST = InferRequest({})
LARGE = InferRequest({"x": np.zeros(1 << 15, np.uint8)})


class Model(EngineModel):
    """A model whose engine does what a test wants; its outputs are what the engine gives."""

    def __init__(self, error: Any = None) -> None:
        self.engine = SimpleNamespace(steps=0)  # type: ignore[assignment]
        self.noted: list[str] = []
        self.metrics = SimpleNamespace(  # type: ignore[assignment]
            refused=self.noted.append,
            ended=self.noted.append,
            completed=lambda *_: self.noted.append("completed"),
        )
        self.running, self._canary_steps = set(), -1
        self.future: Future[Any] = Future()
        self.begins, self.goes_on = threading.Event(), threading.Event()
        self.error = error

    def submit(
        self, request: InferRequest, on_step: Callable[[Any], bool]
    ) -> tuple[Future[Any], Callable[[Any], Outputs | None]]:
        self.on_step = on_step
        if self.error is not None:
            raise self.error
        self.begins.set()
        if request is LARGE:
            self.goes_on.wait(10)
        return self.future, lambda state: None if state == "nothing" else {"y": state}


class Host(Answering):
    """Keeps the answers of requests by their keys."""

    pause_s = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[Any]] = defaultdict(list)
        self._thread.start()

    def _send(self, key: str, outputs: Outputs, *, final: bool, queued_s: float) -> None:
        assert queued_s == 0
        self.sent[key].append((outputs["y"], final))

    def _fail(self, key: str, error: ModelError) -> None:
        self.sent[key].append((str(error), error.code))

    def end_of(self, key: str) -> list[Any]:
        """Wait until a request has ended, and return its answers."""
        until(lambda: key not in self._running, "the end")
        return self.sent[key]

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()


@pytest.fixture
def answering() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


def test_steps_come_in_order_and_the_result_last(answering):
    model = Model()
    answering.ask("a", model, REQUEST)
    for step in ("one", "nothing", "two"):
        model.on_step(step)
    model.future.set_result("all")
    assert answering.end_of("a") == [("one", False), ("two", False), ("all", True)]
    assert model.noted == ["completed"]


@pytest.mark.parametrize(
    ("error", "answer", "noted"),
    [
        (ValueError("too long"), ("too long", "INVALID_ARGUMENT"), "invalid"),
        (EngineBusyError("wait"), ("wait", "UNAVAILABLE"), "busy"),
        (OverflowError(), ("OverflowError", "INTERNAL"), "failed"),
    ],
)
@pytest.mark.parametrize("is_taken", [False, True])
def test_each_request_that_fails_has_its_answer(answering, error, answer, noted, is_taken):
    model = Model(error=None if is_taken else error)
    if is_taken:
        model.future.set_exception(error)
    answering.ask("a", model, REQUEST)
    assert answering.end_of("a") == [answer]
    until(lambda: bool(model.noted), "the end")
    assert model.noted == ["failed" if is_taken else noted]


def test_a_step_that_comes_before_its_request_is_submitted_waits_for_that():
    model, put = Model(), list[Any]()
    asked = EngineRequest(model, LARGE, put.append)
    with ThreadPoolExecutor() as pool:
        pool.submit(asked.submit)
        assert model.begins.wait(10)
        step = pool.submit(asked.response, "one")
        time.sleep(0.1)  # enough to go wrong
        model.goes_on.set()
        assert step.result() == ({"y": "one"}, False)
    model.future.set_result("all")
    assert put == [None]
    assert asked.response(None) == ({"y": "all"}, True)
    asked.end()
    assert (model.noted, model.running) == (["completed"], set())


def test_a_refusal_of_what_was_given_up_meanwhile_harms_nobody():
    model = Model(error=ValueError("too long"))
    asked = EngineRequest(model, LARGE, list[Any]().append)
    asked.end()
    asked.submit()
    assert (model.noted, model.running) == (["cancelled"], set())


@pytest.mark.parametrize("request_", [REQUEST, LARGE])
def test_a_request_whose_client_leaves_is_given_up(answering, request_):
    model = Model()
    answering.ask("a", model, request_)
    assert model.begins.wait(10)
    answering.enqueue("a", CANCEL)
    assert answering.end_of("a") == []
    model.goes_on.set()
    until(model.future.cancelled, "the end")


def test_a_request_whose_client_needs_no_more_is_completed(answering):
    model = Model()
    answering.ask("a", model, REQUEST)
    assert not model.on_step("some")
    answering.enqueue("a", ANSWERED)
    until(lambda: model.on_step("more"), "the report")
    model.future.set_result("all")
    assert answering.end_of("a")[-1] == ("all", True)
    assert model.noted == ["completed"]


def test_a_canary_is_refused_while_the_engine_makes_steps(answering):
    model, canary = Model(), InferRequest({}, is_canary=True)
    answering.ask("a", model, REQUEST)
    answering.ask("first", model, canary)
    assert answering.end_of("first") == [("busy", "UNAVAILABLE")]
    answering.ask("second", model, canary)  # no step since the last one: it waits
    model.future.set_result("all")
    assert answering.end_of("second") == answering.end_of("a") == [("all", True)]


class _Error:
    INVALID_ARG, UNAVAILABLE, CANCELLED = 3, 6, 7

    def __init__(self, text: str, code: int) -> None:
        self.text, self.code = text, code


class Sender:
    """Fails, as the server ends, when it is used after the final response."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.final = self.has_left = False

    def send(self, message: Any, *, flags: int) -> None:
        assert not self.final
        self.final = flags == 1
        self.sent.append(message)

    def is_cancelled(self) -> bool:
        assert not self.final
        return self.has_left


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonHost]:
    """A server; the module of the backend exists only inside one."""
    backend = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=RuntimeError,
        TritonError=_Error,
        Tensor=SimpleNamespace(from_dlpack=lambda name, value: (name, value)),
        InferenceResponse=lambda outputs=None, *, error=None: (
            outputs if error is None else (error.text, error.code)
        ),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    made = TritonHost("m")
    yield made
    made.close()


def asked(host: TritonHost, model: Model, *, streams: bool = False) -> Sender:
    sender = Sender()
    host.ask(TritonSender(sender, ("y",), streams=streams), model, REQUEST)
    return sender


class Value(str):
    """An output."""

    __slots__ = ()

    def contiguous(self) -> Value:
        return self


def test_triton_gets_each_response_and_one_that_is_final(host):
    model = Model()
    sender = asked(host, model)
    assert model.begins.wait(10)
    model.on_step(Value("a"))
    model.future.set_result(Value("b"))
    until(lambda: sender.final, "the end")
    assert sender.sent == [[("y", "a")], [("y", "b")]]


@pytest.mark.parametrize(
    ("error", "streams", "answer"),
    [
        (ValueError("too long"), True, ("too long", 3)),
        (EngineBusyError("wait"), False, ("wait", 6)),
        (EngineBusyError("wait"), True, ("UNAVAILABLE: wait", 6)),
    ],
)
def test_triton_gets_the_code_of_an_error_on_streams_in_its_text(host, error, streams, answer):
    sender = asked(host, Model(error=error), streams=streams)
    until(lambda: sender.final, "the end")
    assert sender.sent == [answer]


def test_triton_is_told_of_the_end_of_a_request_whose_client_has_left(host):
    model = Model()
    sender = asked(host, model)
    assert model.begins.wait(10)
    sender.has_left = True
    until(lambda: sender.final, "the end")
    assert sender.sent == [("the request was cancelled", 7)]
    assert model.future.cancelled()
