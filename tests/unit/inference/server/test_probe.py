"""The small request before a server's address is published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export_scripts.triton.model_config import TritonModelConfig, parse_config
from export_scripts.triton.signature import (
    ModelSignature,
    ensemble,
    interactive,
    model_signature,
)
from inference.server.admin import Admin, probe_tensors
from inference.server.server import TritonServer
from inference.server.server_log import ServerStartError
from tests.fake_triton import FakeTriton, Infer, RefusedError, served


def config_of(signature: ModelSignature, **options: Any) -> Any:
    """Return a configuration as a server reports it."""
    settings: dict[str, Any] = {"name": "m", "backend": "python", "max_batch_size": 4} | options
    text = TritonModelConfig(signature=signature, **settings).to_text()
    return parse_config(text)


def tensors_of(config: Any, hidden: int | None = None) -> dict[str, Any]:
    found = probe_tensors(config, hidden=hidden)
    assert found is not None
    return found


def values(array: Any, dtype: str) -> list[Any]:
    assert array.dtype == dtype
    found: list[Any] = array.tolist()
    return found


@pytest.mark.parametrize("model_type", ["GPT", "GPT-J", "GPT-NeoX", "Llama"])
def test_request_to_a_generator_is_two_tokens_in_and_two_out(model_type: str) -> None:
    tensors = tensors_of(config_of(model_signature(model_type, data_type="fp16")))
    assert set(tensors) == {"input_ids", "input_lengths", "request_output_len"}
    assert values(tensors["input_ids"], "<u4") == [[0, 0]]
    assert values(tensors["input_lengths"], "<u4") == [[2]]
    assert values(tensors["request_output_len"], "<u4") == [[2]]


def test_request_to_an_encoder_decoder_has_its_names() -> None:
    tensors = tensors_of(config_of(model_signature("T5", data_type="fp32")))
    assert set(tensors) == {"input_ids", "sequence_length", "max_output_len"}


def test_request_to_an_ensemble_is_a_short_text() -> None:
    signature = ensemble(model_signature("GPT", data_type="fp32"))
    tensors = tensors_of(config_of(signature))
    assert set(tensors) == {"INPUT_0", "INPUT_1"}
    assert values(tensors["INPUT_0"], "O") == [[b"Hello"]]


@pytest.mark.parametrize(
    ("data_type", "dtype", "ones"), [("fp32", "<f4", 1.0), ("fp16", "<f2", 1.0)]
)
def test_request_of_hidden_states_needs_their_width(
    data_type: str, dtype: str, ones: float
) -> None:
    config = config_of(model_signature("bert", data_type=data_type))
    assert probe_tensors(config, hidden=None) is None
    tensors = tensors_of(config, hidden=3)
    assert values(tensors["input_hidden_state"], dtype) == [[[ones] * 3] * 2]
    assert values(tensors["sequence_lengths"], "<i4") == [[2]]


def test_request_of_a_session_says_how_much_it_holds() -> None:
    signature = interactive(model_signature("GPT", data_type="fp32"))
    tensors = tensors_of(config_of(signature, interactive=True, max_batch_size=1))
    assert tensors["input_ids"].shape == (1, 1, 2)
    assert tensors["session_len"].shape == (1, 1, 1)


def ask(address: str, *, timeout_s: float = 20.0, check: Callable[[], None] = lambda: None) -> None:
    server = TritonServer("m", log_path=Path("no log"))
    server._admin = admin = Admin(address)
    try:
        server.await_answer("m", timeout_s=timeout_s, check=check)
    finally:
        admin.close()


def fake(infer: Infer, **options: Any) -> FakeTriton:
    return FakeTriton({"m": config_of(model_signature("GPT", data_type="fp32"), **options)}, infer)


def refuse(request: Any) -> None:
    raise RefusedError("out of memory")


def test_answer_of_any_kind_is_enough() -> None:
    server = fake(lambda _: None)
    with served(server) as address:
        ask(address)
    (request,) = server.requests
    assert sum(map(len, request.raw_input_contents)) == 16


@pytest.mark.parametrize("decoupled", [False, True])
def test_refusal_is_reported_in_the_words_of_the_server(decoupled: bool) -> None:
    with (
        served(fake(refuse, decoupled=decoupled)) as address,
        pytest.raises(ServerStartError, match=r"model m did not answer .*: out of memory"),
    ):
        ask(address)


def test_streaming_model_has_answered_with_its_last_response() -> None:
    server = fake(lambda _: None, decoupled=True)
    with served(server) as address:
        ask(address)
    assert len(server.requests) == 1


@pytest.mark.parametrize("decoupled", [False, True])
def test_silence_ends_with_the_timeout_or_the_last_waiter(decoupled: bool) -> None:
    released = threading.Event()
    silent = fake(lambda _: released.wait(30), decoupled=decoupled)
    with served(silent) as address:
        try:
            with pytest.raises(
                ServerStartError,
                match=r"model m did not answer .*Deadline Exceeded\)? \(within 0\.3 s\)",
            ):
                ask(address, timeout_s=0.3)
            started = time.monotonic()
            with pytest.raises(InterruptedError):
                ask(address, check=_interrupt)
            assert time.monotonic() - started < 10
        finally:
            released.set()


def _interrupt() -> None:
    raise InterruptedError


def test_server_that_is_gone_is_reported() -> None:
    with pytest.raises(ServerStartError, match=r"model m did not answer .*onnect"):
        ask("127.0.0.1:9")
