"""A request's exchange with the server: one final response, and no question after it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from inference.backend.engine_model import EngineModel
from inference.backend.exchange import Exchange
from inference.backend.triton_model import TritonExchange
from inference.engine.errors import EngineBusyError


class Sender:
    """Fails, as the server ends, when it is used after the final response."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.final = False

    def send(self, message: str, *, flags: int) -> None:
        assert not self.final
        self.final = flags == 1
        self.sent.append(message)

    def is_cancelled(self) -> bool:
        assert not self.final
        return True


class _Error:
    INVALID_ARG, UNAVAILABLE, INTERNAL = 3, 6, 13

    def __init__(self, text: str, code: int) -> None:
        self.text, self.code = text, code


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> TritonExchange:
    """Return an exchange; the module of the backend exists only inside the server."""
    backend = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=RuntimeError,
        TritonError=_Error,
        InferenceResponse=lambda outputs=None, *, error=None: (
            outputs if error is None else (error.text, error.code)
        ),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    sender = Sender()
    request = SimpleNamespace(
        inputs=list,
        get_response_sender=lambda: sender,
        requested_output_names=lambda: ["y"],
        parameters=lambda: "",
    )
    return TritonExchange(request)


def test_a_client_that_left_is_noticed(exchange: TritonExchange) -> None:
    exchange.send({}, final=False)
    assert exchange.is_cancelled()


def test_the_server_is_not_asked_about_a_finished_request(exchange: TritonExchange) -> None:
    exchange.send({}, final=True)
    assert not exchange.is_cancelled()


def test_nothing_is_sent_after_the_final_response(exchange: TritonExchange) -> None:
    exchange.send({}, final=True)
    exchange.send({}, final=True)
    assert exchange._sender.sent == [[]]


@pytest.mark.parametrize(
    ("error", "answer", "noted"),
    [
        (ValueError("too long"), ("too long", 3), "invalid"),
        (EngineBusyError("wait"), ("wait", 6), "busy"),
        (OverflowError(), ("OverflowError", 13), "failed"),
    ],
)
def test_each_request_that_is_not_taken_has_its_answer(
    exchange: TritonExchange, error: Exception, answer: tuple[str, int], noted: str
) -> None:
    class Model(EngineModel):
        def submit(self, exchange: Exchange) -> Any:
            del exchange
            raise error

    model = Model()
    reasons: list[str] = []
    model.metrics = SimpleNamespace(refused=reasons.append, ended=reasons.append)  # type: ignore[assignment]
    model.take(exchange)
    assert exchange._sender.sent == [answer]
    assert reasons == [noted]
