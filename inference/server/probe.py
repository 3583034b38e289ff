"""Small requests that show whether a server answers: before its address is published, and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype

from inference.server.admin import SESSION_LEN, Admin, NoAnswerError, is_interactive

_POLL_S = 0.1
# Two tokens in and two out: the prompt's pass and a decoding step, both warm for real requests.
_TOKENS = 2
_TEXTS = {
    **dict.fromkeys(("INPUT_0", "QUERY", "query", "prompts"), b"Hello"),
    "tasks": b"text_generation",
}
_IDS = "input_ids"
_MAX_LENGTH = "max_length"  # 30 tokens without it
_COUNTS = (
    *("input_lengths", "sequence_length", "sequence_lengths"),
    *("request_output_len", "max_output_len", "INPUT_1", "REQUEST_OUTPUT_LEN"),
    _MAX_LENGTH,
)
_SESSION_TOKENS = 64  # session_len is optional in config.pbtxt, and needed all the same
_HIDDEN_TYPES = ("FP32", "FP16", "BF16")


class ProbeError(RuntimeError):
    """The server did not answer the request; the message holds the server's own."""


def probe_tensors(config: Any, *, hidden: int | None) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return the inputs of a small valid request to a model, whose configuration is a message.

    `hidden` is the width of the hidden states that an encoder may take; without it the result for
    such a model is None.
    """
    needed = (_MAX_LENGTH, SESSION_LEN) if is_interactive(config) else (_MAX_LENGTH,)
    found = {}
    for each in config.input:
        if each.optional and each.name not in needed:
            continue
        kind = model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")
        dims = [max(size, 1) for size in each.dims]
        value: int | bytes = 1
        if kind in _HIDDEN_TYPES and len(dims) > 1:
            if hidden is None:
                return None
            dims[-2:] = [_TOKENS, hidden]
        elif kind == "STRING":
            value = _TEXTS.get(each.name, b"")
        elif each.name == _IDS:
            value, dims[-1] = 0, _TOKENS  # a token of every vocabulary
        elif each.name in _COUNTS:
            value = _TOKENS
        elif each.name == SESSION_LEN:
            value = _SESSION_TOKENS
        elif kind == "BOOL":
            value = 0
        dtype = object if kind == "STRING" else triton_to_np_dtype(kind)
        found[each.name] = np.full([1] * bool(config.max_batch_size) + dims, value, dtype)
    return found


def probe(
    admin: Admin,
    model: str,
    *,
    hidden: int | None,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Send a model a small request, and wait for the answer, at most for `timeout_s`.

    A model that needs `hidden` is not asked where it is unknown, see `probe_tensors`. `check` is
    called repeatedly; an exception that it raises ends the wait. Raises ProbeError if the model has
    answered with an error, or not in time.
    """
    deadline = time.monotonic() + timeout_s
    # In a thread, since a server may accept a request and not answer; it ends with the server.
    pool = ThreadPoolExecutor(1, thread_name_prefix="probe")
    answered = pool.submit(_ask, admin, model, hidden, timeout_s)
    pool.shutdown(wait=False)
    while not answered.done() and time.monotonic() <= deadline:
        check()
        wait([answered], timeout=_POLL_S)
    error = answered.exception() if answered.done() else NoAnswerError()
    if isinstance(error, NoAnswerError) and time.monotonic() >= deadline:
        raise ProbeError(f"{model}: no answer to a first small request in {timeout_s:g} s")
    if error is not None:
        raise ProbeError(f"model {model} did not answer a first small request: {error}") from error


def _ask(admin: Admin, model: str, hidden: int | None, timeout_s: float) -> None:
    config = admin.config(model)
    if (tensors := probe_tensors(config, hidden=hidden)) is not None:
        admin.ask(model, config, tensors, timeout_s=timeout_s)
