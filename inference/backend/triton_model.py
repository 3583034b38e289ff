"""Adapter between the models and Triton's Python backend: arguments, requests, responses, log.

`triton_python_backend_utils` exists only inside the server's stub process, so it is imported inside
functions.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from inference.backend.answering import Answering
from inference.backend.arguments import ModelArguments
from inference.backend.instances import Instance
from inference.backend.metrics import HISTOGRAM, ModelMetric, ModelMetrics
from inference.backend.requests import (
    Array,
    InferRequest,
    ModelError,
    ModelHost,
    Outputs,
    readable,
)
from inference.decoding.rows import SessionTurn
from inference.system.supervision import CANARY_PARAMETER, report_end

Args = Mapping[str, str]
_REPORT_S = 0.5
# Clients to check at a time; a check whether one has left takes 0.1 ms.
_ASKED_AT_ONCE = 64
_POLL_S = 0.01
_FLUSH_S = 2.0  # to hand the answers of a failed engine to the server
_SEND_S = 0.4  # for the server to send them
_CODES = {"INVALID_ARGUMENT": "INVALID_ARG"}  # codes that Triton names differently
# Control inputs that the server adds to the requests of a sequence.
_CONTROLS = ("START", "END")


def triton_arguments(args: Args) -> ModelArguments:
    """Return the arguments with which Triton loads a model."""
    config = json.loads(args["model_config"])
    return ModelArguments(
        config,
        args["model_repository"],
        version=args["model_version"],
        instance=Instance.of(config, args.get("model_instance_name", "")),
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
    """Return the session turn of a request, None without one; removes its control inputs."""
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


class TritonSender:
    """Sends the responses to one request, with the `wanted` outputs.

    Attributes:
        is_cancelled: returns whether the client has left; not to be called after the final
            response.
    """

    def __init__(self, sender: Any, wanted: Collection[str], *, streams: bool) -> None:
        self._sender, self._wanted, self._streams = sender, wanted, streams
        self.is_cancelled = sender.is_cancelled

    def send(self, outputs: Outputs, *, final: bool = True) -> None:
        """Send the wanted ones of `outputs`."""
        import triton_python_backend_utils as pb_utils

        tensors = [
            pb_utils.Tensor(name, value)
            if isinstance(value, np.ndarray)
            else pb_utils.Tensor.from_dlpack(name, value.contiguous())
            for name, value in outputs.items()
            if name in self._wanted
        ]
        self._put(pb_utils.InferenceResponse(tensors), final=final)

    def fail(self, error: ModelError) -> None:
        """Send an error as the final response."""
        import triton_python_backend_utils as pb_utils

        # Streams have no field for the code: the text names it, unless the request is invalid.
        is_named = self._streams and error.code != "INVALID_ARGUMENT"
        text = f"{error.code}: {error}" if is_named else str(error)
        kind = getattr(pb_utils.TritonError, _CODES.get(error.code, error.code))
        answer = pb_utils.InferenceResponse(error=pb_utils.TritonError(text, kind))
        self._put(answer, final=True)

    def _put(self, message: Any, *, final: bool) -> None:
        import triton_python_backend_utils as pb_utils

        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            self._sender.send(message, flags=flags)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_warn(f"a response could not be sent: {error}")


class TritonHost(Answering):
    """Hosts a model in a stub process of tritonserver, which ends with the server.

    The key of a request is the sender of its responses.
    """

    pause_s = 0.1

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._parent = os.getppid()
        self._looked_s = 0.0
        self._next = 0  # index of the running request to check next
        self._thread.start()

    def show(self, metrics: ModelMetrics) -> None:
        """Report metrics to the server twice a second.

        A separate thread does it, since each change waits for the server process.
        """
        threading.Thread(target=self._report, args=(metrics,), name="metrics", daemon=True).start()

    def _report(self, metrics: ModelMetrics) -> None:
        import triton_python_backend_utils as pb_utils

        family, found = pb_utils.MetricFamily, list[tuple[ModelMetric, Any]]()
        families = {}  # a metric lasts as long as its family
        for metric in metrics.read():
            row = metric.row
            if not hasattr(family, row.kind):  # HISTOGRAM is in releases from 2.51 on
                continue
            if row.name not in families:
                kind = getattr(family, row.kind)
                families[row.name] = family(name=row.name, description=row.text, kind=kind)
            more = {"buckets": row.bounds} if row.kind == HISTOGRAM else {}
            found.append((metric, families[row.name].Metric(labels=dict(metric.labels), **more)))
            metric.unreported = []
        while not self._is_closing:
            for metric, shown in found:
                values, metric.unreported = metric.unreported or (), []
                for value in values:
                    shown.observe(value)
                if metric.row.kind != HISTOGRAM and (change := metric.value - shown.value()):
                    shown.increment(change)
            time.sleep(_REPORT_S)
            metrics.read()

    def _send(self, key: TritonSender, outputs: Outputs, *, final: bool, queued_s: float) -> None:
        del queued_s  # tritonserver measures its own times
        key.send(outputs, final=final)

    def _fail(self, key: TritonSender, error: ModelError) -> None:
        key.fail(error)

    def _flush(self) -> None:
        """Check some of the clients for disconnection, and whether the server has ended."""
        if (now := time.monotonic()) < self._looked_s + self.pause_s:
            return
        self._looked_s = now
        if os.getppid() != self._parent:
            os._exit(1)  # the workers end with this process
        running = list(self._running)
        first = self._next if self._next < len(running) else 0
        self._next = first + _ASKED_AT_ONCE
        for sender in running[first : self._next]:
            if sender.is_cancelled():
                sender.fail(ModelError("the request was cancelled", "CANCELLED"))
                self._end(sender)

    def _wait_for_answers(self) -> None:
        until = time.monotonic() + _FLUSH_S
        while self._running and time.monotonic() < until:
            time.sleep(_POLL_S)

    def warn(self, message: str) -> None:
        """Write a warning to the server's log."""
        import triton_python_backend_utils as pb_utils

        pb_utils.Logger.log_warn(f"{self._name}: {message}")

    def go_out_of_service(self, reason: str) -> None:
        """End this process, and thereby the server, once every request has its answer.

        The supervisor ends a server that has lost a model, and the deploy stage restarts it.
        Without a supervisor the model is unloaded, and then listed as not ready.
        """
        import triton_python_backend_utils as pb_utils

        text = f"{self._name} is out of service: {reason}"
        pb_utils.Logger.log_error(text)
        if report_end(text):
            self._wait_for_answers()
            time.sleep(_SEND_S)
            os._exit(1)
        try:
            pb_utils.unload_model(self._name)
        except pb_utils.TritonModelException as error:
            # Unloading is disabled by the server's options.
            pb_utils.Logger.log_warn(f"{self._name} stays listed as ready: {error}")

    def close(self) -> None:
        """End the thread, once every request has its answer."""
        self._wait_for_answers()
        self._is_closing = True
        self._thread.join()


class TritonModel:
    """A model for both servers: this project's own calls `load` and `close`.

    Triton calls `initialize`, `execute` and `finalize`.

    Attributes:
        decoupled: whether a request may have several responses.
        interactive: whether requests may belong to sessions.
        bf16_inputs: names of the BF16 inputs.
    """

    decoupled = interactive = False
    bf16_inputs: Collection[str] = ()
    _host: TritonHost

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        """Load the model. Raises ValueError if it cannot be loaded."""
        raise NotImplementedError

    def respond(self, request: InferRequest, sender: TritonSender) -> None:
        """Answer a request through `sender`, now or later."""
        raise NotImplementedError

    def close(self) -> None:
        """End the threads and processes of the model."""

    def initialize(self, args: Args) -> None:
        """Load the model (called by Triton).

        After a ValueError Triton reports its message and lists the model as unavailable.
        """
        self._host = TritonHost(args["model_name"])
        try:
            self.load(triton_arguments(args), self._host)
        except Exception as error:
            if (text := readable(error)) == str(error):
                raise
            raise ValueError(text) from error  # other bytes would end the process

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer requests (called by Triton); returning None means that answers follow later."""
        for triton_request in requests:
            tensors = _request_tensors(triton_request, self.bf16_inputs)
            request = InferRequest(
                tensors,
                turn=_turn(triton_request, tensors) if self.interactive else None,
                is_canary=CANARY_PARAMETER in json.loads(triton_request.parameters() or "{}"),
            )
            wanted = tuple(triton_request.requested_output_names())
            responses = triton_request.get_response_sender()
            self.respond(request, TritonSender(responses, wanted, streams=self.decoupled))

    def finalize(self) -> None:
        """End the model (called by Triton)."""
        self.close()
        self._host.close()
