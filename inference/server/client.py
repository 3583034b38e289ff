"""Client of a Triton server: text or tensors, one answer or a stream, many requests at once.

Works against any server with these models; the inputs of a model are read from the server itself.
Requests never go through a proxy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from types import TracebackType
from typing import Any

import numpy as np

from inference.decoding.rows import SessionTurn
from inference.front.credentials import PLAIN, Credentials
from inference.server.transport import (
    GrpcTransport,
    HttpTransport,
    Outputs,
    Tensors,
    TypedTensors,
    stream_responses,
    typed_tensor,
)

PROTOCOLS = ("grpc", "http")
DEFAULT_URLS = {"grpc": "localhost:8001", "http": "localhost:8000"}
DEFAULT_IN_FLIGHT = 64
_TEXT_INPUTS = {"prompt": "INPUT_0", "output_len": "INPUT_1"}
# Text input, ids and lengths of the models that encode text.
_ENCODERS = (
    ("QUERY", "INPUT_ID", "REQUEST_INPUT_LEN"),
    ("query", "input_ids", "request_input_len"),
)
_OPTION_NAMES = {"bad_words": "INPUT_2", "stop_words": "INPUT_3"}


class TritonClient:
    """A connection to one server; safe to use from several threads.

    At most `max_in_flight` asynchronous requests wait for the server at a time. `timeout_s` limits
    each request. `model_name` and `ensemble_name` are those of the repository. `credentials` hold
    TLS and the token.

    Failures raise tritonclient's InferenceServerException, with the server's message, or stating
    that the server is unreachable.

    Raises:
        ValueError: the protocol is unknown, or `max_in_flight` is not positive.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        protocol: str = "grpc",
        model_name: str = "fastertransformer",
        ensemble_name: str = "ensemble",
        timeout_s: float | None = None,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        credentials: Credentials = PLAIN,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ValueError(
                f"protocol={protocol!r} is unknown; use one of {', '.join(PROTOCOLS)}."
            )
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight} must be at least 1.")
        self.url = (url or DEFAULT_URLS[protocol]).removeprefix(f"{protocol}://")
        self.protocol = protocol
        self.model_name = model_name
        self.ensemble_name = ensemble_name
        self.timeout_s = timeout_s
        self._credentials = credentials
        self._places = threading.BoundedSemaphore(max_in_flight)
        self._input_types: dict[str, dict[str, str]] = {}
        self._decoupled: dict[str, bool] = {}
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="triton-stream")
        transport = GrpcTransport if protocol == "grpc" else HttpTransport
        self._transport: GrpcTransport | HttpTransport = transport(
            self.url, timeout_s=timeout_s, max_in_flight=max_in_flight, credentials=credentials
        )

    def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        outputs: Sequence[str] | None = None,
        turn: SessionTurn | None = None,
    ) -> Outputs:
        """Send one request and return its outputs by name: `outputs`, or all of them.

        Floating-point inputs are sent in the precision that the model declares. Of a streaming
        model the last response is returned, which holds the whole answer. An interactive model
        needs `turn`, its session.
        """
        if self.streams(model):
            return self._last_frame(model, inputs, outputs, turn)
        return self._transport.infer(model, self._typed(model, inputs), outputs, turn)

    def infer_async(
        self, model: str, inputs: Tensors, *, outputs: Sequence[str] | None = None
    ) -> Future[Outputs]:
        """Send one request without waiting for the answer; blocks while too many are in flight."""
        self._places.acquire()
        try:
            if self.streams(model):
                future = self._pool.submit(self._last_frame, model, inputs, outputs)
            else:
                typed = self._typed(model, inputs)
                future = self._transport.infer_async(model, typed, outputs)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return future

    def stream(
        self,
        model: str,
        inputs: Tensors,
        *,
        outputs: Sequence[str] | None = None,
        turn: SessionTurn | None = None,
    ) -> Iterator[Outputs]:
        """Yield each response of one request; closing the iterator cancels the request.

        An interactive model needs `turn`, its session.

        Raises:
            ValueError: the protocol is not grpc.
        """
        if self.protocol != "grpc":
            raise ValueError("streaming needs protocol=grpc: HTTP carries one response a request.")
        typed = self._typed(model, inputs)
        return stream_responses(
            self.url, self._credentials, self.timeout_s, model, typed, outputs, turn
        )

    def _typed(self, model: str, inputs: Tensors) -> TypedTensors:
        types = self.input_types(model)
        return {name: typed_tensor(np.asarray(v), types.get(name)) for name, v in inputs.items()}

    def streams(self, model: str) -> bool:
        """Return whether `model` answers in several responses, which HTTP cannot carry."""
        if model not in self._decoupled:
            self._decoupled[model] = self._transport.is_decoupled(model)
        return self._decoupled[model] and self.protocol == "grpc"

    def _last_frame(
        self,
        model: str,
        inputs: Tensors,
        outputs: Sequence[str] | None,
        turn: SessionTurn | None = None,
    ) -> Outputs:
        *_, last = self.stream(model, inputs, outputs=outputs, turn=turn)
        return last

    def input_types(self, model: str) -> Mapping[str, str]:
        """Return the inputs that `model` declares and their Triton types, which are cached."""
        if model not in self._input_types:
            self._input_types[model] = self._transport.input_types(model)
        return self._input_types[model]

    def text_request(
        self, prompts: Sequence[str], *, output_len: int, options: Mapping[str, Any] | None = None
    ) -> Outputs:
        """Return the ensemble's inputs, one row per prompt, options repeated in each row.

        `options` are values by the contract's names, and `bad_words` and `stop_words`, each one CSV
        record. An option of None is left out.

        Raises:
            ValueError: the ensemble takes no such option (all of them are named).
        """
        types = self.input_types(self.ensemble_name)
        values = {_OPTION_NAMES.get(k, k): v for k, v in (options or {}).items() if v is not None}
        if unknown := sorted(set(values) - set(types)):
            taken = ", ".join(sorted(set(types) - {*_TEXT_INPUTS.values()}))
            raise ValueError(
                f"{self.ensemble_name} takes no {', '.join(unknown)}; its options are: {taken}."
            )
        rows = len(prompts)
        columns = {name: [value] * rows for name, value in values.items()}
        columns |= {"INPUT_0": list(prompts), "INPUT_1": [output_len] * rows}
        return {name: as_tensor(column, types[name]) for name, column in columns.items()}

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        output_len: int,
        options: Mapping[str, Any] | None = None,
        rows_per_request: int = 1,
    ) -> list[list[str]]:
        """Return the texts of each prompt, best beam first, in the order of the prompts.

        Prompts are sent `rows_per_request` at a time, many requests in flight.
        """
        groups = [
            prompts[start : start + rows_per_request]
            for start in range(0, len(prompts), rows_per_request)
        ]
        futures = [
            self.infer_async(
                self.ensemble_name,
                self.text_request(group, output_len=output_len, options=options),
                outputs=["OUTPUT_0"],
            )
            for group in groups
        ]
        return [row for future in futures for row in as_texts(future.result()["OUTPUT_0"])]

    def stream_text(
        self, prompt: str, *, output_len: int, options: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Yield the text of one prompt in pieces, which together are the whole text.

        Raises:
            ValueError: `options` ask for several beams, whose text changes after it was sent.
        """
        if (options or {}).get("beam_width", 1) not in (None, 1):
            raise ValueError("beam_width must be 1 to stream: a better beam replaces text sent.")
        inputs = self.text_request([prompt], output_len=output_len, options=options)
        text = shown = ""
        for frame in self.stream(self.ensemble_name, inputs, outputs=["OUTPUT_0"]):
            text = as_texts(frame["OUTPUT_0"])[0][0]
            # Some servers send an unfinished character and replace it later.
            if text != shown and text.startswith(shown):
                yield text[len(shown) :]
                shown = text
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, shown, strict=False))
        if text != shown:
            yield text[len(list(same)) :]

    def encode(self, texts: Sequence[str], *, model: str = "preprocessing") -> list[list[int]]:
        """Return the token ids of each text, made by the server's preprocessing or tokenizer.

        Raises:
            ValueError: `model` takes no text.
        """
        types = self.input_types(model)
        names = next((names for names in _ENCODERS if names[0] in types), None)
        if names is None:
            raise ValueError(f"{model} does not tokenize text; its inputs are {sorted(types)}.")
        query, ids, lengths = names
        inputs = {query: as_tensor(list(texts), "BYTES")}
        if "REQUEST_OUTPUT_LEN" in types:
            inputs["REQUEST_OUTPUT_LEN"] = as_tensor([1] * len(texts), "UINT32")
        outputs = self.infer(model, inputs, outputs=[ids, lengths])
        counts = outputs[lengths][:, 0]
        return [row[:count].tolist() for row, count in zip(outputs[ids], counts, strict=True)]

    def is_ready(self, model: str | None = None) -> bool:
        """Return whether the server (or one model of it) answers and is ready."""
        from tritonclient.utils import InferenceServerException

        try:
            return self._transport.is_ready(model)
        except (InferenceServerException, OSError):
            return False

    def models(self) -> list[dict[str, str]]:
        """Return name and state of every model in the server's repository."""
        return self._transport.models()

    def close(self) -> None:
        """Close the connection."""
        self._pool.shutdown()
        self._transport.close()

    def __enter__(self) -> TritonClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_tensor(values: Sequence[Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return one value per row in Triton's `dtype`: (B, 1), or (B, ...) if the values are arrays.

    Raises:
        ValueError: a value does not fit the type.
    """
    if dtype == "BYTES":
        column = np.empty((len(values), 1), dtype=object)
        column[:, 0] = [value.encode() if isinstance(value, str) else value for value in values]
        return column
    from tritonclient.utils import triton_to_np_dtype

    kind = np.dtype(triton_to_np_dtype(dtype))
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        for value in values:
            if isinstance(value, int) and not limits.min <= value <= limits.max:
                raise ValueError(
                    f"{value!r} is not a valid {dtype}: it must be {limits.min} to {limits.max}."
                )
    try:
        column = np.array(values, dtype=kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{values[0]!r} is not a valid {dtype}: {error}") from error
    return column[:, None] if column.ndim == 1 else column


def as_texts(tensor: np.ndarray[Any, Any]) -> list[list[str]]:
    """Return a (B, K) tensor of bytes as text; a flat one has one text per row."""
    rows = tensor.reshape(len(tensor), -1)
    return [[bytes(value).decode(errors="replace") for value in row] for row in rows]
