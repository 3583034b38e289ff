"""Small requests that show whether a server answers: before its address is published, and after.

Plain HTTP with binary tensors: every release of tritonserver accepts it, without a client library.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

from inference.server.local_http import local_opener

Config = Mapping[str, Any]  # config.pbtxt of a model as the server reports it

_POLL_S = 0.1
_HTTP_TIMEOUT_S = 10.0
# Two tokens in and two out: the prompt's pass and a decoding step, both warm for real requests.
_TOKENS = 2
_TEXTS = ("INPUT_0", "QUERY", "query")
_TEXT = "Hello"
_IDS = "input_ids"
_COUNTS = (
    *("input_lengths", "sequence_length", "sequence_lengths"),
    *("request_output_len", "max_output_len", "INPUT_1", "REQUEST_OUTPUT_LEN"),
)
_SESSION_LEN, _SESSION_TOKENS = "session_len", 64  # optional in config.pbtxt, needed all the same
_SESSION = {"sequence_id": 2**31, "sequence_start": True, "sequence_end": True}
_INTEGER_BYTES = {"UINT32": 4, "INT32": 4, "UINT64": 8}
_FLOAT_ONES = {"FP32": b"\x00\x00\x80\x3f", "FP16": b"\x00\x3c", "BF16": b"\x80\x3f"}
_HIDDEN_TYPES = tuple(f"TYPE_{dtype}" for dtype in _FLOAT_ONES)


class ProbeError(RuntimeError):
    """The server did not answer the request; the message holds the server's own."""


class RefusalError(ValueError):
    """An HTTP answer with a status other than 200, or an error within a stream (status 500)."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words or f"HTTP status {status}")
        self.status = status


@dataclass(frozen=True)
class ProbeTensor:
    """One input of the request: `value` in every place, text for BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: int | str

    def raw(self) -> bytes:
        """Return the tensor's bytes as they are sent."""
        count = 1
        for size in self.shape:
            count *= size
        if isinstance(self.value, str):
            text = self.value.encode()
            one = len(text).to_bytes(4, "little") + text
        elif self.dtype in _FLOAT_ONES:
            one = _FLOAT_ONES[self.dtype]
        else:
            one = self.value.to_bytes(_INTEGER_BYTES.get(self.dtype, 1), "little")
        return one * count


def probe_tensors(config: Config, *, hidden: int | None) -> list[ProbeTensor] | None:
    """Return the inputs of a small valid request to a model.

    Args:
        config: Of the model.
        hidden: Width of the hidden states that an encoder may take; without it the result for such
            a model is None.
    """
    is_session = is_interactive(config)
    wanted = [
        tensor
        for tensor in config["input"]
        if not tensor.get("optional", False) or (is_session and tensor["name"] == _SESSION_LEN)
    ]
    if hidden is None and any(_is_hidden_state(tensor) for tensor in wanted):
        return None
    batch = (1,) if int(config.get("max_batch_size", 0)) else ()
    return [_tensor(tensor, batch, hidden or 0) for tensor in wanted]


def _is_hidden_state(declared: Mapping[str, Any]) -> bool:
    return str(declared["data_type"]) in _HIDDEN_TYPES and len(declared["dims"]) > 1


def _tensor(declared: Mapping[str, Any], batch: tuple[int, ...], hidden: int) -> ProbeTensor:
    name = str(declared["name"])
    dtype = str(declared["data_type"]).removeprefix("TYPE_").replace("STRING", "BYTES")
    dims = [max(int(size), 1) for size in declared["dims"]]
    value: int | str = 1
    if dtype == "BYTES":
        value = _TEXT if name in _TEXTS else ""
    elif name == _IDS:
        value, dims[-1] = 0, _TOKENS  # a token of every vocabulary
    elif name in _COUNTS:
        value = _TOKENS
    elif name == _SESSION_LEN:
        value = _SESSION_TOKENS
    elif dtype == "BOOL":
        value = 0
    if _is_hidden_state(declared):
        dims[-2:] = [_TOKENS, hidden]
    return ProbeTensor(name, dtype, (*batch, *dims), value)


def probe(
    address: str,
    models: Sequence[str],
    *,
    hidden: int | None,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Send each model a small request, and wait for the answers.

    Args:
        address: host:port of HTTP.
        models: Their names.
        hidden: See `probe_tensors`; a model that needs it is skipped where it is unknown.
        timeout_s: Longest wait for all of them.
        check: Called repeatedly; an exception that it raises ends the wait.

    Raises:
        ProbeError: Some model answered with an error, or not in time.
    """
    # In a thread, since a server may accept a request and not answer; it ends with the server.
    pool = ThreadPoolExecutor(1, thread_name_prefix="probe")
    answered = pool.submit(lambda: [_failure(address, each, hidden, timeout_s) for each in models])
    pool.shutdown(wait=False)
    deadline = time.monotonic() + timeout_s
    while not answered.done():
        check()
        if time.monotonic() > deadline:
            raise ProbeError(_silence(", ".join(models), timeout_s))
        wait([answered], timeout=_POLL_S)
    if failures := [failure for failure in answered.result() if failure]:
        raise ProbeError("\n".join(failures))


def _failure(address: str, model: str, hidden: int | None, timeout_s: float) -> str:
    """Return the reason why a model has not answered, empty if it has."""
    try:
        config = model_config(address, model)
        if (tensors := probe_tensors(config, hidden=hidden)) is not None:
            ask_model(address, model, config, tensors, timeout_s=timeout_s)
    except (OSError, HTTPException, ValueError) as error:
        if is_timeout(error):
            return _silence(model, timeout_s)
        return f"model {model} did not answer a first small request: {error}"
    return ""


def _silence(models: str, timeout_s: float) -> str:
    return f"{models}: no answer to a first small request in {timeout_s:g} s"


def is_timeout(error: BaseException) -> bool:
    """Return whether a request ended by its timeout."""
    return isinstance(error, TimeoutError) or isinstance(
        getattr(error, "reason", None), TimeoutError
    )


def model_config(address: str, model: str) -> Config:
    """Return the configuration of a model. Raises OSError or ValueError if it is unavailable."""
    config: Config = json.loads(
        http_request(f"http://{address}/v2/models/{model}/config", timeout_s=_HTTP_TIMEOUT_S)
    )
    return config


def is_interactive(config: Config) -> bool:
    """Return whether a model's requests belong to sessions, or an ensemble hands them to one."""
    return "sequence_batching" in config or any(
        tensor["name"] == _SESSION_LEN for tensor in config["input"]
    )


def ask_model(
    address: str,
    model: str,
    config: Config,
    tensors: Sequence[ProbeTensor],
    *,
    timeout_s: float,
    parameters: Mapping[str, Any] | None = None,
) -> None:
    """Send one request and wait for its answer.

    Args:
        address: host:port of HTTP.
        model: Its name.
        config: Of the model.
        tensors: From `probe_tensors`.
        timeout_s: Longest wait for the answer.
        parameters: Of the request.

    Raises:
        RefusalError: The model answered with an error; the message is the server's.
        OSError: There was no answer.
    """
    url = f"http://{address}/v2/models/{model}"
    parameters = dict(parameters or {})
    if config.get("model_transaction_policy", {}).get("decoupled", False):
        _ask_for_stream(url, tensors, timeout_s, parameters)
        return
    parameters["binary_data_output"] = True
    if is_interactive(config):
        parameters |= _SESSION
    raw = [tensor.raw() for tensor in tensors]
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.dtype,
            "shape": tensor.shape,
            "parameters": {"binary_data_size": len(data)},
        }
        for tensor, data in zip(tensors, raw, strict=True)
    ]
    header = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    http_request(
        f"{url}/infer",
        body=header + b"".join(raw),
        headers={"Inference-Header-Content-Length": str(len(header))},
        timeout_s=timeout_s,
    )


def _ask_for_stream(
    url: str, tensors: Sequence[ProbeTensor], timeout_s: float, parameters: Mapping[str, Any]
) -> None:
    """Send a request to a streaming model, which plain HTTP requests do not reach.

    Releases before the generate endpoint (23.10) need gRPC for that, and are skipped.
    """
    values = dict(parameters)
    for tensor in tensors:
        count = tensor.shape[-1]
        values[tensor.name] = tensor.value if count == 1 else [tensor.value] * count
    body = json.dumps(values).encode()
    try:
        answer = http_request(f"{url}/generate_stream", body=body, timeout_s=timeout_s)
    except RefusalError as error:
        if error.status == HTTPStatus.NOT_FOUND:
            return
        raise
    for line in answer.decode(errors="replace").splitlines():
        # A stream that has begun reports an error as an event.
        if line.startswith("data:") and line[5:].lstrip().startswith('{"error"'):
            raise RefusalError(HTTPStatus.INTERNAL_SERVER_ERROR, json.loads(line[5:])["error"])


def http_request(
    url: str,
    *,
    timeout_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Return the body of an answer with status 200. Raises RefusalError or OSError."""
    request = urllib.request.Request(url, data=body, headers=dict(headers or {}))
    try:
        with local_opener().open(request, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise RefusalError(error.code, _words(error.read())) from error


def _words(body: bytes) -> str:
    """Return the message in the answer of a server that refuses."""
    text = body.decode(errors="replace").strip()
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text
