"""The two transports to a Triton server, gRPC and HTTP, with one interface."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from inference.decoding.rows import SessionTurn
from inference.front.credentials import Credentials, with_token

Tensors = Mapping[str, "np.ndarray[Any, Any]"]
Outputs = dict[str, "np.ndarray[Any, Any]"]
TypedTensors = Mapping[str, tuple["np.ndarray[Any, Any]", str]]  # values and their Triton type

# The client library takes BF16, which numpy lacks, as FP32.
_FLOAT_TYPES: dict[str, Any] = {"FP16": np.float16, "FP32": np.float32, "BF16": np.float32}
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


def typed_tensor(
    value: np.ndarray[Any, Any], declared: str | None
) -> tuple[np.ndarray[Any, Any], str]:
    """Return an input and the type to send it as: its own, or for floats the declared precision."""
    from tritonclient.utils import np_to_triton_dtype

    if value.dtype.kind == "f" and declared in _FLOAT_TYPES:
        return value.astype(_FLOAT_TYPES[declared], copy=False), declared
    return value, np_to_triton_dtype(value.dtype)


def _infer_inputs(module: Any, inputs: TypedTensors) -> list[Any]:
    built = []
    for name, (value, dtype) in inputs.items():
        tensor = module.InferInput(name, list(value.shape), dtype)
        tensor.set_data_from_numpy(value)
        built.append(tensor)
    return built


def _wanted(module: Any, outputs: Sequence[str] | None) -> list[Any] | None:
    return None if outputs is None else [module.InferRequestedOutput(name) for name in outputs]


def _sequence(turn: SessionTurn | None) -> dict[str, Any]:
    """Return the arguments of the client library that name a session."""
    if turn is None:
        return {}
    return {
        "sequence_id": turn.session_id,
        "sequence_start": turn.starts,
        "sequence_end": turn.ends,
    }


def grpc_outputs(result: Any) -> Outputs:
    """Return the outputs of one gRPC response by name."""
    return _arrays(result, [output.name for output in result.get_response().outputs])


def _arrays(result: Any, names: Sequence[str]) -> Outputs:
    return {name: result.as_numpy(name) for name in names}


class GrpcTransport:
    """gRPC: one channel carries any number of requests."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None,
        max_in_flight: int,  # noqa: ARG002
        credentials: Credentials,
    ) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._timeout_s = timeout_s
        self._client = _grpc_client(url, credentials)

    def infer(
        self,
        model: str,
        inputs: TypedTensors,
        outputs: Sequence[str] | None,
        turn: SessionTurn | None = None,
    ) -> Outputs:
        """Send one request and return its outputs by name."""
        return grpc_outputs(
            self._client.infer(
                model,
                _infer_inputs(self._grpc, inputs),
                outputs=_wanted(self._grpc, outputs),
                client_timeout=self._timeout_s,
                **_sequence(turn),
            )
        )

    def infer_async(
        self, model: str, inputs: TypedTensors, outputs: Sequence[str] | None
    ) -> Future[Outputs]:
        """Send one request without waiting for its answer."""
        future: Future[Outputs] = Future()

        def answered(result: Any, error: Exception | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(grpc_outputs(result))

        self._client.async_infer(
            model,
            _infer_inputs(self._grpc, inputs),
            callback=answered,
            outputs=_wanted(self._grpc, outputs),
            client_timeout=self._timeout_s,
        )
        return future

    def input_types(self, model: str) -> dict[str, str]:
        """Return the inputs of `model` and their Triton types."""
        metadata = self._client.get_model_metadata(model, client_timeout=self._timeout_s)
        return {tensor.name: tensor.datatype for tensor in metadata.inputs}

    def is_decoupled(self, model: str) -> bool:
        """Return whether `model` may answer a request with several responses."""
        reply = self._client.get_model_config(model, client_timeout=self._timeout_s)
        return bool(reply.config.model_transaction_policy.decoupled)

    def is_ready(self, model: str | None) -> bool:
        """Return whether the server, or one model, is ready."""
        if model is None:
            return bool(self._client.is_server_ready(client_timeout=self._timeout_s))
        return bool(self._client.is_model_ready(model, client_timeout=self._timeout_s))

    def models(self) -> list[dict[str, str]]:
        """Return name and state of every model."""
        index = self._client.get_model_repository_index(client_timeout=self._timeout_s)
        return [{"name": model.name, "state": model.state} for model in index.models]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class HttpTransport:
    """HTTP: a connection serves one thread at a time, so each thread has its own."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None,
        max_in_flight: int,
        credentials: Credentials,
    ) -> None:
        from tritonclient import http

        self._http = http
        self._url = url
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="triton-http")

    @property
    def _client(self) -> Any:
        if not hasattr(self._local, "client"):
            # None means no limit; the library's own default is one minute.
            client = self._http.InferenceServerClient(
                self._url, network_timeout=self._timeout_s, **self._credentials.http_arguments()
            )
            self._local.client = with_token(client, self._credentials)
        return self._local.client

    def infer(
        self,
        model: str,
        inputs: TypedTensors,
        outputs: Sequence[str] | None,
        turn: SessionTurn | None = None,
    ) -> Outputs:
        """Send one request and return its outputs by name."""
        result = self._client.infer(
            model,
            _infer_inputs(self._http, inputs),
            outputs=_wanted(self._http, outputs),
            **_sequence(turn),
        )
        return _arrays(result, [output["name"] for output in result.get_response()["outputs"]])

    def infer_async(
        self, model: str, inputs: TypedTensors, outputs: Sequence[str] | None
    ) -> Future[Outputs]:
        """Send one request without waiting for its answer."""
        return self._pool.submit(self.infer, model, inputs, outputs)

    def input_types(self, model: str) -> dict[str, str]:
        """Return the inputs of `model` and their Triton types."""
        metadata = self._client.get_model_metadata(model)
        return {tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]}

    def is_decoupled(self, model: str) -> bool:
        """Return whether `model` may answer a request with several responses."""
        policy = self._client.get_model_config(model).get("model_transaction_policy", {})
        return bool(policy.get("decoupled", False))

    def is_ready(self, model: str | None) -> bool:
        """Return whether the server, or one model, is ready."""
        from geventhttpclient.response import HTTPParseError

        client = self._client
        try:
            return bool(client.is_server_ready() if model is None else client.is_model_ready(model))
        except HTTPParseError:  # the answer is not HTTP, or is HTTP over TLS
            return False

    def models(self) -> list[dict[str, str]]:
        """Return name and state of every model."""
        index = self._client.get_model_repository_index()
        return [{key: each.get(key, "") for key in ("name", "state")} for each in index]

    def close(self) -> None:
        """Close this thread's connection; those of the pool close with their threads."""
        self._pool.shutdown()
        if hasattr(self._local, "client"):
            self._local.client.close()


def _grpc_client(url: str, credentials: Credentials) -> Any:
    from tritonclient import grpc

    client = grpc.InferenceServerClient(
        url, channel_args=_GRPC_OPTIONS, **credentials.grpc_arguments()
    )
    return with_token(client, credentials)


def stream_responses(
    url: str,
    credentials: Credentials,
    timeout_s: float | None,
    model: str,
    inputs: TypedTensors,
    outputs: Sequence[str] | None,
    turn: SessionTurn | None = None,
) -> Iterator[Outputs]:
    """Yield the responses of one request over a stream of its own."""
    from tritonclient import grpc

    responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    # A stream belongs to its client object; without a pool of its own, channels to the same address
    # share one connection.
    client = _grpc_client(url, credentials)
    done = False
    try:
        client.start_stream(
            callback=lambda result, error: responses.put((result, error)), stream_timeout=timeout_s
        )
        client.async_stream_infer(
            model,
            _infer_inputs(grpc, inputs),
            outputs=_wanted(grpc, outputs),
            enable_empty_final_response=True,
            **_sequence(turn),
        )
        while not done:
            result, error = responses.get()
            if error is not None:
                raise error
            message = result.get_response()
            done = message.parameters["triton_final_response"].bool_param
            if message.outputs:
                yield grpc_outputs(result)
    finally:
        client.stop_stream(cancel_requests=not done)
        client.close()
