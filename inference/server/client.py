"""Client of a Triton server: text or tensors, single answers or streams, concurrent requests.

It works against any server with these models; it reads a model's inputs from the server. Requests
never go through a proxy.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np

from inference.decoding.rows import SessionTurn
from inference.front.access import PLAIN, Credentials
from inference.server.tensors import as_tensor, as_texts, typed_tensor
from inference.system.ports import TRITON_PORTS

Tensors = Mapping[str, "np.ndarray[Any, Any]"]
Outputs = dict[str, "np.ndarray[Any, Any]"]

PROTOCOLS = ("grpc", "http")
DEFAULT_URLS = {name: f"localhost:{TRITON_PORTS[name]}" for name in PROTOCOLS}
DEFAULT_IN_FLIGHT = 64
# Names of the text input and of the ids and lengths of models that tokenize text.
_ENCODERS = (
    ("QUERY", "INPUT_ID", "REQUEST_INPUT_LEN"),
    ("query", "input_ids", "request_input_len"),
)
# Names of text, length and answer in models from text to text: ensembles, and the models for
# clients of PyTriton and NeMo.
_TEXTS = (
    ("INPUT_0", "INPUT_1", "OUTPUT_0"),
    *(("prompts", length, "sentences")
      for length in ("request_output_len", "max_length", "max_output_len")),
)  # fmt: skip
_OPTION_NAMES = {"bad_words": "INPUT_2", "stop_words": "INPUT_3"}
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)


class TritonClient:
    """A connection to one server; safe to use from several threads.

    At most `max_in_flight` asynchronous requests are sent at a time. `timeout_s` limits each
    request. `model_name` and `ensemble_name` are names in the repository. `credentials` hold the
    TLS settings and the token.

    Raises ValueError if the protocol is unknown or `max_in_flight` is not positive. Failed requests
    raise tritonclient's InferenceServerException with the server's message, or with the reason why
    the server is unreachable.
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
        self._library = importlib.import_module(f"tritonclient.{protocol}")
        self._is_grpc = protocol == "grpc"
        # An HTTP connection serves one thread at a time, a gRPC channel any number.
        self._held: Any = SimpleNamespace() if self._is_grpc else threading.local()
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="triton-client")
        self._configs: dict[str, dict[str, Any]] = {}

    def infer(
        self,
        model: str,
        inputs: Tensors,
        *,
        outputs: Sequence[str] | None = None,
        turn: SessionTurn | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> Outputs:
        """Send one request and return its outputs by name: `outputs`, or all of them.

        Floating-point inputs are sent in the precision that the model declares. For a streaming
        model this returns the last response, which holds the whole answer. An interactive model
        needs `turn`, its session.
        """
        request = self._request(model, inputs, outputs, turn)
        if parameters is not None:
            request["parameters"] = dict(parameters)
        if not self.streams(model):
            return _arrays(self._call("infer", model, **request))
        last = deque(self._frames(model, request), maxlen=1)
        return last[0] if last else {}

    def infer_async(
        self, model: str, inputs: Tensors, *, outputs: Sequence[str] | None = None
    ) -> Future[Outputs]:
        """Send one request without waiting for the answer; `max_in_flight` are sent at a time."""
        return self._pool.submit(self.infer, model, inputs, outputs=outputs)

    def stream(
        self,
        model: str,
        inputs: Tensors,
        *,
        outputs: Sequence[str] | None = None,
        turn: SessionTurn | None = None,
    ) -> Generator[Outputs, None, None]:
        """Yield each response of one request; closing the iterator cancels the request.

        An interactive model needs `turn`, its session. Raises ValueError unless the protocol is
        grpc.
        """
        if not self._is_grpc:
            raise ValueError("streaming needs protocol=grpc: HTTP carries one response a request.")
        request = self._request(model, inputs, outputs, turn)
        return self._frames(model, request)

    def _frames(self, model: str, request: dict[str, Any]) -> Generator[Outputs, None, None]:
        responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        # A client object has one stream; channels to the same address share a connection.
        client, done = self._connected(), False
        try:
            client.start_stream(
                callback=lambda result, error: responses.put((result, error)),
                stream_timeout=self.timeout_s,
            )
            client.async_stream_infer(model, **request, enable_empty_final_response=True)
            while not done:
                result, error = responses.get()
                if error is not None:
                    raise error
                message = result.get_response()
                done = message.parameters["triton_final_response"].bool_param
                if message.outputs:
                    yield _arrays(result)
        finally:
            client.stop_stream(cancel_requests=not done)
            client.close()

    def _connected(self) -> Any:
        # None means no limit; HTTP's default would be one minute.
        limits = {"channel_args": list(_CHANNEL_OPTIONS)} if self._is_grpc else {
            "network_timeout": self.timeout_s
        }  # fmt: skip
        client = self._library.InferenceServerClient(
            self.url, **limits, **self._credentials.client_arguments(self.protocol)
        )
        if headers := self._credentials.headers():
            client.register_plugin(lambda request: request.headers.update(headers))
        return client

    def _call(self, method: str, *args: Any, **more: Any) -> Any:
        if not hasattr(self._held, "client"):
            self._held.client = self._connected()
        if self._is_grpc:
            more["client_timeout"] = self.timeout_s
        return getattr(self._held.client, method)(*args, **more)

    def _config(self, model: str) -> dict[str, Any]:
        if model not in self._configs:
            more = {"as_json": True} if self._is_grpc else {}
            found = self._call("get_model_config", model, **more)
            self._configs[model] = found["config"] if self._is_grpc else found
        return self._configs[model]

    def _request(
        self,
        model: str,
        inputs: Tensors,
        outputs: Sequence[str] | None,
        turn: SessionTurn | None,
    ) -> dict[str, Any]:
        types, tensors = self.input_types(model), []
        for name, tensor in inputs.items():
            value, dtype = typed_tensor(np.asarray(tensor), types.get(name))
            tensors.append(self._library.InferInput(name, list(value.shape), dtype))
            tensors[-1].set_data_from_numpy(value)
        request: dict[str, Any] = {"inputs": tensors}
        if outputs is not None:
            request["outputs"] = [self._library.InferRequestedOutput(name) for name in outputs]
        if turn is not None:
            request |= {
                "sequence_id": turn.session_id,
                "sequence_start": turn.starts,
                "sequence_end": turn.ends,
            }
        return request

    def parameters(self, model: str) -> dict[str, str]:
        """Return the parameters of a model's configuration."""
        found = self._config(model).get("parameters", {})
        return {key: value["string_value"] for key, value in found.items()}

    def streams(self, model: str) -> bool:
        """Return whether `model` answers in several responses; always False over HTTP."""
        if not self._is_grpc:
            return False
        return bool(self._config(model).get("model_transaction_policy", {}).get("decoupled"))

    def input_types(self, model: str) -> Mapping[str, str]:
        """Return the inputs that `model` declares and their Triton types."""
        return {
            tensor["name"]: tensor["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
            for tensor in self._config(model).get("input", ())
        }

    def text_request(
        self, prompts: Sequence[str], *, output_len: int, options: Mapping[str, Any] | None = None
    ) -> Outputs:
        """Return the inputs of the text model, a row for each prompt, all with the same options.

        `options` are values by input name, and `bad_words` and `stop_words`, each one CSV record.
        None values are left out. Raises ValueError, which names every option that the ensemble does
        not take.
        """
        types = self.input_types(self.ensemble_name)
        values = {_OPTION_NAMES.get(k, k): v for k, v in (options or {}).items() if v is not None}
        text, length, _ = self._text_names()
        if unknown := sorted(set(values) - set(types)):
            known = ", ".join(sorted(set(types) - {text, length}))
            raise ValueError(
                f"{self.ensemble_name} takes no {', '.join(unknown)}; its options are: {known}."
            )
        rows = len(prompts)
        columns = {name: [value] * rows for name, value in values.items()}
        columns |= {text: list(prompts), length: [output_len] * rows}
        return {name: as_tensor(column, types[name]) for name, column in columns.items()}

    def _text_names(self) -> tuple[str, str, str]:
        types = self.input_types(self.ensemble_name)
        found = next((names for names in _TEXTS if {*names[:2]} <= types.keys()), None)
        if found is None:
            raise ValueError(
                f"{self.ensemble_name} takes no texts; its inputs are {', '.join(sorted(types))}."
            )
        return found

    def generate_text(
        self,
        prompts: Sequence[str],
        *,
        output_len: int,
        options: Mapping[str, Any] | None = None,
    ) -> list[list[str]]:
        """Return the texts of each prompt, best beam first.

        Each prompt is a request of its own; they run concurrently.
        """
        futures, (*_, answer) = [], self._text_names()
        for prompt in prompts:
            inputs = self.text_request([prompt], output_len=output_len, options=options)
            futures.append(self.infer_async(self.ensemble_name, inputs, outputs=[answer]))
        return [row for future in futures for row in as_texts(future.result()[answer])]

    def stream_text(
        self, prompt: str, *, output_len: int, options: Mapping[str, Any] | None = None
    ) -> Iterator[str]:
        """Yield the text for one prompt in pieces, which together are the whole text.

        Raises ValueError for several beams, whose earlier text may still change.
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
        """Return the token ids of each text from the server's preprocessing or tokenizer model.

        Raises ValueError if `model` takes no text.
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

        failures: tuple[type[Exception], ...] = (InferenceServerException, OSError)
        if not self._is_grpc:
            from geventhttpclient.response import HTTPParseError  # takes seconds to import

            failures += (HTTPParseError,)  # the answer is not HTTP, or it is HTTPS
        asked = ("is_server_ready",) if model is None else ("is_model_ready", model)
        try:
            return bool(self._call(*asked))
        except failures:
            return False

    def models(self) -> list[dict[str, str]]:
        """Return name and state of every model in the server's repository."""
        more = {"as_json": True} if self._is_grpc else {}
        index = self._call("get_model_repository_index", **more)
        found = index.get("models", ()) if self._is_grpc else index
        return [{key: model.get(key, "") for key in ("name", "state")} for model in found]

    def close(self) -> None:
        """Close the connection; the pool's connections close with their threads."""
        self._pool.shutdown()
        if hasattr(self._held, "client"):
            self._held.client.close()

    def __enter__(self) -> TritonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _arrays(result: Any) -> Outputs:
    response = result.get_response()  # a gRPC message, or JSON
    names = (
        [output["name"] for output in response["outputs"]]
        if isinstance(response, dict)
        else [output.name for output in response.outputs]
    )
    found = {name: result.as_numpy(name) for name in names}
    for name, array in found.items():
        if array.dtype.name == "bfloat16":  # ml_dtypes' type, which numpy's functions do not know
            found[name] = array.astype(np.float32)
    return found
