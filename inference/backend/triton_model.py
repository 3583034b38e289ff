"""The models in Triton's Python backend: its arguments, requests, responses and log.

`triton_python_backend_utils` exists only inside the server's stub process; it is imported where it
is used.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from inference.backend.arguments import ModelArguments
from inference.backend.exchange import INVALID, Array, Exchange
from inference.decoding.rows import SessionTurn
from inference.system.supervision import CANARY_PARAMETER, report_end

Args = Mapping[str, str]
_FLUSH_S = 2.0  # for handing the answers of a failed engine to the server
_PARENT_S = 0.1  # between two looks whether the server is there
_SEND_S = 0.4  # for the server to send them
# Inputs that the server adds to the requests of a sequence.
_CONTROLS = ("START", "END")


def triton_arguments(args: Args) -> ModelArguments:
    """Return the arguments with which Triton loads a model."""
    return ModelArguments(
        json.loads(args["model_config"]),
        args["model_repository"],
        version=args["model_version"],
        instance_name=args.get("model_instance_name", ""),
    )


def _request_tensors(request: Any, bf16: Collection[str]) -> dict[str, Array]:
    return {
        tensor.name(): _from_bf16(tensor) if tensor.name() in bf16 else tensor.as_numpy()
        for tensor in request.inputs()
    }


def _from_bf16(tensor: Any) -> Array:
    from torch.utils.dlpack import from_dlpack

    return np.asarray(from_dlpack(tensor.to_dlpack()).float().numpy())


def _turn(request: Any, tensors: dict[str, Array]) -> SessionTurn | None:
    """Return the session of a request; its control inputs, if it has some, are taken out."""
    import triton_python_backend_utils as pb_utils

    flags = request.flags()
    starts, ends = (
        bool(tensors.pop(name).any()) if name in tensors else bool(flags & flag)
        for name, flag in zip(
            _CONTROLS,
            (
                pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
                pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
            ),
            strict=True,
        )
    )
    session_id = request.correlation_id()
    return SessionTurn(session_id, starts=starts, ends=ends) if session_id else None


def response(outputs: Mapping[str, Any], wanted: Collection[str]) -> Any:
    """Return a Triton response with those of `outputs` that the client wants."""
    import triton_python_backend_utils as pb_utils

    tensors = [
        pb_utils.Tensor(name, value)
        if isinstance(value, np.ndarray)
        else pb_utils.Tensor.from_dlpack(name, value.contiguous())
        for name, value in outputs.items()
        if name in wanted
    ]
    return pb_utils.InferenceResponse(tensors)


def error_response(message: str, code: str = INVALID) -> Any:
    """Return a Triton response that carries an error; `code` names one of TritonError's codes."""
    import triton_python_backend_utils as pb_utils

    return pb_utils.InferenceResponse(
        error=pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    )


class TritonExchange(Exchange):
    """A request of Triton and its response sender."""

    def __init__(
        self,
        request: Any,
        *,
        streams: bool = False,
        interactive: bool = False,
        bf16: Collection[str] = (),
    ) -> None:
        tensors = _request_tensors(request, bf16)
        super().__init__(
            tensors,
            tuple(request.requested_output_names()),
            turn=_turn(request, tensors) if interactive else None,
            is_canary=CANARY_PARAMETER in json.loads(request.parameters() or "{}"),
        )
        self._streams = streams
        self._sender = request.get_response_sender()
        self._closed = False
        self._lock = threading.Lock()

    def is_cancelled(self) -> bool:
        """Return whether the client left.

        After the final response the server has dropped the request, and is not asked.
        """
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
        """Send one response; nothing is sent after the final one."""
        self._send(response(outputs, self.wanted), final=final)

    def fail(self, message: str, code: str) -> None:
        """Answer with an error, which ends the exchange.

        Streams carry no code: the text names it unless the request itself is wrong.
        """
        if self._streams and code != INVALID:
            message = f"{code}: {message}"
        self._send(error_response(message, code), final=True)

    def _send(self, message: Any, *, final: bool) -> None:
        import triton_python_backend_utils as pb_utils

        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            if self._closed:
                return
            self._closed = final
            try:
                self._sender.send(message, flags=flags)
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_warn(f"a response could not be sent: {error}")


class TritonHost:
    """The server around the process of one model, which ends with the server."""

    def __init__(self, name: str) -> None:
        import triton_python_backend_utils as pb_utils

        self.metric_family = pb_utils.MetricFamily
        self._name = name
        self._parent = os.getppid()
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="responses", daemon=True)
        self._thread.start()

    def warn(self, message: str) -> None:
        """Write to the server's log."""
        import triton_python_backend_utils as pb_utils

        pb_utils.Logger.log_warn(f"{self._name}: {message}")

    def post(self, call: Callable[[], None]) -> None:
        """Call a function in the thread that sends responses."""
        self._outbox.put(call)

    def leave(self, reason: str) -> None:
        """End this process, and thereby the server, once every request has its answer.

        The supervisor ends a server that has lost a model, and the deploy stage restarts it. A
        server without a supervisor unloads the model, which is then listed as not ready.
        """
        import triton_python_backend_utils as pb_utils

        text = f"{self._name} is out of service: {reason}"
        pb_utils.Logger.log_error(text)
        if report_end(text):
            flushed = threading.Event()
            self.post(flushed.set)
            flushed.wait(_FLUSH_S)
            time.sleep(_SEND_S)
            os._exit(1)
        try:
            pb_utils.unload_model(self._name)
        except pb_utils.TritonModelException as error:
            # The server's own options reserve the unloading of models to itself.
            pb_utils.Logger.log_warn(f"{self._name} stays listed as ready: {error}")

    def close(self) -> None:
        """End the thread that sends responses."""
        self._outbox.put(None)
        self._thread.join()

    def _deliver(self) -> None:
        while True:
            try:
                call = self._outbox.get(timeout=_PARENT_S)
            except queue.Empty:
                if os.getppid() != self._parent:
                    os._exit(1)  # the workers follow
                continue
            if call is None:
                return
            call()


def with_readable_errors(load: Callable[[Any, Args], None]) -> Callable[[Any, Args], None]:
    """Wrap `initialize`: file names in messages as UTF-8, without which the process would end."""

    @functools.wraps(load)
    def initialize(model: Any, args: Args) -> None:
        try:
            load(model, args)
        except Exception as error:
            text = str(error)
            readable = text.encode(errors="surrogateescape").decode(errors="replace")
            if readable == text:
                raise
            raise ValueError(readable) from error

    return initialize


class TritonTensorModel:
    """The methods that Triton calls of a model that answers each request at once."""

    @with_readable_errors
    def initialize(self: Any, args: Args) -> None:
        """Load the model (called by Triton)."""
        self.load(triton_arguments(args))

    def execute(self: Any, requests: Sequence[Any]) -> list[Any]:
        """Answer requests (called by Triton)."""
        found = []
        for request in requests:
            tensors = _request_tensors(request, ())
            turn = _turn(request, tensors) if self.interactive else None
            try:
                outputs = self.answer(tensors, turn)
            except ValueError as error:
                found.append(error_response(str(error)))
            except Exception as error:  # any failure is this request's, not its neighbours'
                found.append(error_response(str(error) or type(error).__name__, "INTERNAL"))
            else:
                found.append(response(outputs, request.requested_output_names()))
        return found


class TritonEngineModel:
    """The methods that Triton calls of a model with an engine."""

    @with_readable_errors
    def initialize(self: Any, args: Args) -> None:
        """Start the engine (called by Triton).

        Of a ValueError Triton reports the message, and the model stays unavailable.
        """
        self.load(triton_arguments(args), TritonHost(args["model_name"]))

    def execute(self: Any, requests: Sequence[Any]) -> None:
        """Queue requests (called by Triton); None means that the answers follow later."""
        how = {"streams": self.decoupled, "interactive": self.interactive, "bf16": self.bf16_inputs}
        for request in requests:
            self.take(TritonExchange(request, **how))

    def finalize(self: Any) -> None:
        """Stop the engine (called by Triton)."""
        self.close()
