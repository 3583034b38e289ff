"""The owner's connection to a tritonserver: readiness, models, statistics, and small requests.

gRPC over the server's Unix socket, or over TCP to a server of another project. Every release that
serves FasterTransformer models has these calls.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.server.server_log import short_reason

if TYPE_CHECKING:
    import numpy as np

_TIMEOUT_S = 1.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    # Channels of one process to the same address would share a connection, and the time that gRPC
    # waits after a refused one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
]
SESSION_LEN = "session_len"
_SESSION = {"sequence_id": 2**31, "sequence_start": True, "sequence_end": True}


class NoAnswerError(OSError):
    """The server did not answer in time, or cannot be reached."""


class RefusalError(ValueError):
    """The server answered with an error; `code` is gRPC's, such as INTERNAL."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words or code)
        self.code = code


@dataclass(frozen=True)
class ModelStatus:
    """One line of the server's repository index.

    Attributes:
        state: READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded.
    """

    name: str
    state: str
    reason: str


@dataclass(frozen=True)
class ProbeTensor:
    """One input of the request: `value` in every place, text for BYTES."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: int | str

    def array(self) -> np.ndarray[Any, Any]:
        """Return the tensor as the client library takes it, which has FP32 for BF16."""
        import numpy as np
        from tritonclient.utils import triton_to_np_dtype

        if isinstance(self.value, str):
            return np.full(self.shape, self.value.encode(), dtype=object)
        return np.full(self.shape, self.value, dtype=triton_to_np_dtype(self.dtype))


class Admin:
    """A connection to one server; safe to use from several threads.

    Every method raises NoAnswerError where the server does not answer, and RefusalError where it
    answers with an error.
    """

    def __init__(self, target: str) -> None:
        """Connect at the first call; `target` is `unix:PATH` or `host:port`."""
        from tritonclient import grpc

        self.target = target
        self._grpc = grpc
        self._client = grpc.InferenceServerClient(target, channel_args=_OPTIONS)

    def close(self) -> None:
        """Close the connection; calls in progress end with an error."""
        self._client.close()

    def is_ready(self) -> bool:
        """Return whether the server says that it serves."""
        return bool(self._call(self._client.is_server_ready))

    def is_model_ready(self, name: str) -> bool:
        """Return whether the server says that a model serves."""
        return bool(self._call(self._client.is_model_ready, name))

    def models(self) -> list[ModelStatus]:
        """Return the state of every model of the repository."""
        index = self._call(self._client.get_model_repository_index)
        return [
            ModelStatus(each.name, each.state, short_reason(each.reason)) for each in index.models
        ]

    def config(self, name: str) -> Any:
        """Return a model's configuration, the protobuf message of Triton."""
        return self._call(self._client.get_model_config, name).config

    def executed(self, name: str) -> int:
        """Return how often a model has run and how many requests it has answered, added up."""
        found = self._call(self._client.get_inference_statistics, name).model_stats
        return sum(each.execution_count + each.inference_stats.success.count for each in found)

    def ask(
        self,
        name: str,
        config: Any,
        tensors: Sequence[ProbeTensor],
        *,
        timeout_s: float,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        """Send one request and wait for its whole answer.

        Args:
            name: Of the model.
            config: Of the model.
            tensors: Its inputs.
            timeout_s: Longest wait.
            parameters: Of the request.
        """
        inputs = []
        for tensor in tensors:
            inputs.append(self._grpc.InferInput(tensor.name, list(tensor.shape), tensor.dtype))
            inputs[-1].set_data_from_numpy(tensor.array())
        options: dict[str, Any] = {"parameters": parameters}
        if is_interactive(config):
            options |= _SESSION
        if config.model_transaction_policy.decoupled:
            self._stream(name, inputs, timeout_s, options)
        else:
            self._call(self._client.infer, name, inputs, timeout_s=timeout_s, **options)

    def _stream(self, name: str, inputs: Any, timeout_s: float, options: dict[str, Any]) -> None:
        """Send a request to a streaming model on a stream, which belongs to a client object."""
        responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        client = self._grpc.InferenceServerClient(self.target, channel_args=_OPTIONS)
        deadline = time.monotonic() + timeout_s
        try:
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(name, inputs, enable_empty_final_response=True, **options)
            while True:
                result, error = responses.get(timeout=max(deadline - time.monotonic(), 0.0))
                if error is not None:
                    self._raise(error)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return
        except queue.Empty:
            raise NoAnswerError(f"no answer within {timeout_s:g} s") from None
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def _call(
        self, method: Callable[..., Any], *words: Any, timeout_s: float = _TIMEOUT_S, **more: Any
    ) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return method(*words, client_timeout=timeout_s, **more)
        except InferenceServerException as error:
            self._raise(error)

    def _raise(self, error: Any) -> None:
        words = str(error.message())
        # An error within a stream has no code; the text begins with one, see `Exchange.fail`.
        code = str(error.status() or words.partition(": ")[0]).removeprefix("StatusCode.")
        if code in ("DEADLINE_EXCEEDED", "CANCELLED") or _is_unreachable(code, words):
            raise NoAnswerError(words) from error
        raise RefusalError(code, words) from error


def _is_unreachable(code: str, words: str) -> bool:
    """Return whether gRPC itself, and not the server, says that it is unavailable."""
    return code == "UNAVAILABLE" and ("connect" in words or "Socket closed" in words)


def is_interactive(config: Any) -> bool:
    """Return whether a model's requests belong to sessions, or an ensemble hands them to one."""
    return bool(
        config.HasField("sequence_batching")
        or any(tensor.name == SESSION_LEN for tensor in config.input)
    )
