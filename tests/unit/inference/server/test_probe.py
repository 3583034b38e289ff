"""The small request before a server's address is published."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

from export_scripts.triton.model_config import TritonModelConfig, parse_config
from export_scripts.triton.signature import (
    ModelSignature,
    ensemble,
    interactive,
    model_signature,
)
from inference.server.probe import ProbeError, ProbeTensor, probe, probe_tensors

Answer = Callable[[str, bytes], tuple[int, Any]]


def config_of(signature: ModelSignature, **options: Any) -> dict[str, Any]:
    """Return a configuration as a server reports it."""
    settings = {"name": "m", "backend": "python", "max_batch_size": 4} | options
    text = TritonModelConfig(signature=signature, **settings).to_text()
    reported: dict[str, Any] = json_format.MessageToDict(
        parse_config(text), preserving_proto_field_name=True
    )
    return reported


def tensors_of(config: dict[str, Any], hidden: int | None = None) -> dict[str, ProbeTensor]:
    found = probe_tensors(config, hidden=hidden)
    assert found is not None
    return {tensor.name: tensor for tensor in found}


def values(tensor: ProbeTensor, dtype: str) -> list[Any]:
    found: list[Any] = np.frombuffer(tensor.raw(), dtype).reshape(tensor.shape).tolist()
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
    assert tensors["INPUT_0"].raw() == b"\x05\x00\x00\x00Hello"


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


@pytest.fixture
def server() -> Iterator[tuple[str, list[Answer]]]:
    """Yields an address and a list for the function that answers there."""
    answers: list[Answer] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b"")

        def do_POST(self) -> None:
            self.answer(self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, body: bytes) -> None:
            status, content = answers[0](self.path, body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            del words

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{httpd.server_port}", answers
    finally:
        httpd.shutdown()
        httpd.server_close()


def ask(address: str, *, timeout_s: float = 20.0, check: Callable[[], None] = lambda: None) -> None:
    probe(address, ["m"], hidden=None, timeout_s=timeout_s, check=check)


def answering(infer: Answer, **options: Any) -> Answer:
    config = config_of(model_signature("GPT", data_type="fp32"), **options)

    def answer(path: str, body: bytes) -> tuple[int, Any]:
        return (200, config) if path.endswith("/config") else infer(path, body)

    return answer


def test_answer_of_any_kind_is_enough(server: tuple[str, list[Answer]]) -> None:
    address, answers = server
    paths: list[str] = []

    def infer(path: str, body: bytes) -> tuple[int, Any]:
        paths.append(path)
        text = body.decode("latin-1")
        header, end = json.JSONDecoder().raw_decode(text)
        sizes = [each["parameters"]["binary_data_size"] for each in header["inputs"]]
        assert sum(sizes) == len(text) - end == 16
        return 200, {}

    answers.append(answering(infer))
    ask(address)
    assert paths == ["/v2/models/m/infer"]


def test_refusal_is_reported_in_the_words_of_the_server(server: tuple[str, list[Answer]]) -> None:
    address, answers = server
    answers.append(answering(lambda *_: (500, {"error": "out of memory"})))
    with pytest.raises(ProbeError, match=r"^model m did not answer .*: out of memory$"):
        ask(address)


def test_streaming_model_is_asked_for_a_stream(server: tuple[str, list[Answer]]) -> None:
    address, answers = server
    paths: list[str] = []

    def stream(path: str, _: bytes) -> tuple[int, Any]:
        paths.append(path)
        return 200, b'data: {"output_ids":[0]}\n\ndata: {"error":"a rank is gone"}\n\n'

    answers.append(answering(stream, decoupled=True))
    with pytest.raises(ProbeError, match=r"a rank is gone$"):
        ask(address)
    assert paths == ["/v2/models/m/generate_stream"]
    # A release that has no such address is not asked at all.
    answers[0] = answering(lambda *_: (404, b"Not Found"), decoupled=True)
    ask(address)


def test_silence_ends_with_the_timeout_or_the_last_waiter(server: tuple[str, list[Answer]]) -> None:
    address, answers = server
    released = threading.Event()

    def silent(_: str, __: bytes) -> tuple[int, Any]:
        released.wait(30)
        return 200, {}

    answers.append(answering(silent))
    try:
        with pytest.raises(ProbeError, match=r"m: no answer to a first small request in 0\.3 s"):
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
    with pytest.raises(ProbeError, match=r"model m did not answer .*Connection refused"):
        ask("127.0.0.1:9")
