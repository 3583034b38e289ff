"""The models in Triton's Python backend: its arguments, requests, responses and log.

`triton_python_backend_utils` exists only inside the server's stub process; it is imported where it
is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from inference.backend.arguments import ModelArguments
from inference.backend.instances import Instance
from inference.backend.metrics import HISTOGRAM, ModelMetric, ModelMetrics
from inference.backend.requests import Array, InferRequest, ModelError, ModelHost, Responses
from inference.decoding.rows import SessionTurn
from inference.system.supervision import CANARY_PARAMETER, report_end

Args = Mapping[str, str]
_WATCH_S = 0.1
_REPORT_S = 0.5
# A check whether a client has left takes 0.1 ms; this many are checked at a time.
_ASKED_AT_ONCE = 64
_POLL_S = 0.01
_FLUSH_S = 2.0  # for handing the answers of a failed engine to the server
_SEND_S = 0.4  # for the server to send them
_CODES = {"INVALID_ARGUMENT": "INVALID_ARG"}  # Triton's names where they are others
# Inputs that the server adds to the requests of a sequence.
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


def error_response(message: str, code: str = "INVALID_ARGUMENT") -> Any:
    """Return a Triton response that carries an error; `code` is the name of gRPC's status."""
    import triton_python_backend_utils as pb_utils

    kind = getattr(pb_utils.TritonError, _CODES.get(code, code))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, kind))


class TritonHost:
    """The server around the process of one model, which ends with the server.

    An event loop in a thread answers the requests.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._parent = os.getppid()
        self._running: dict[asyncio.Task[None], Any] = {}  # to the sender of its responses
        self._next = 0  # index of the running request to check next
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop's thread."""
        self._loop.call_soon_threadsafe(call)

    def show(self, metrics: ModelMetrics) -> None:
        """Report metrics to the server twice a second.

        A change of one goes through the server's process: a thread of its own waits for that.
        """
        threading.Thread(target=self._report, args=(metrics,), name="metrics", daemon=True).start()

    def _report(self, metrics: ModelMetrics) -> None:
        import triton_python_backend_utils as pb_utils

        family, found = pb_utils.MetricFamily, list[tuple[ModelMetric, Any]]()
        families = {}  # a metric lasts as long as its family
        for each in metrics.read():
            row = each.row
            if not hasattr(family, row.kind):  # HISTOGRAM is in releases from 2.51 on
                continue
            if row.name not in families:
                kind = getattr(family, row.kind)
                families[row.name] = family(name=row.name, description=row.text, kind=kind)
            more = {"buckets": row.bounds} if row.kind == HISTOGRAM else {}
            found.append((each, families[row.name].Metric(labels=dict(each.labels), **more)))
            each.unreported = []
        while not self._is_closing:
            for each, shown in found:
                values, each.unreported = each.unreported or (), []
                for value in values:
                    shown.observe(value)
                if each.row.kind != HISTOGRAM and (change := each.value - shown.value()):
                    shown.increment(change)
            time.sleep(_REPORT_S)
            metrics.read()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop; returns at once."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    async def answer(
        self, responses: Responses, request: InferRequest, sender: Any, *, streams: bool
    ) -> None:
        """Send the responses to a request, which the client's leaving cancels."""
        import triton_python_backend_utils as pb_utils

        task = asyncio.current_task()
        assert task is not None
        self._running[task] = sender

        def send(message: Any, *, final: bool) -> None:
            if final:  # the server drops the request, and must not be asked about it any more
                del self._running[task]
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            try:
                sender.send(message, flags=flags)
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_warn(f"a response could not be sent: {error}")

        try:
            async with contextlib.aclosing(responses):
                async for outputs, final in responses:
                    send(response(outputs, request.wanted), final=final)
        except ModelError as error:
            # Streams carry no code: the text names it unless the request itself is wrong.
            is_named = streams and error.code != "INVALID_ARGUMENT"
            text = f"{error.code}: {error}" if is_named else str(error)
            send(error_response(text, error.code), final=True)
        except asyncio.CancelledError:
            send(error_response("the request was cancelled", "CANCELLED"), final=True)

    def _run(self) -> None:
        self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        """Look for clients that have left, some of them at a time, and for the server's end."""
        while not self._is_closing:
            await asyncio.sleep(_WATCH_S)
            if os.getppid() != self._parent:
                os._exit(1)  # the workers follow
            running = list(self._running.items())
            first = self._next if self._next < len(running) else 0
            self._next = first + _ASKED_AT_ONCE
            for task, sender in running[first : self._next]:
                if sender.is_cancelled():
                    task.cancel()

    def _flush(self) -> None:
        until = time.monotonic() + _FLUSH_S
        while self._running and time.monotonic() < until:
            time.sleep(_POLL_S)

    def warn(self, message: str) -> None:
        """Write to the server's log."""
        import triton_python_backend_utils as pb_utils

        pb_utils.Logger.log_warn(f"{self._name}: {message}")

    def leave(self, reason: str) -> None:
        """End this process, and thereby the server, once every request has its answer.

        The supervisor ends a server that has lost a model, and the deploy stage restarts it. A
        server without a supervisor unloads the model, which is then listed as not ready.
        """
        import triton_python_backend_utils as pb_utils

        text = f"{self._name} is out of service: {reason}"
        pb_utils.Logger.log_error(text)
        if report_end(text):
            self._flush()
            time.sleep(_SEND_S)
            os._exit(1)
        try:
            pb_utils.unload_model(self._name)
        except pb_utils.TritonModelException as error:
            # The server's own options reserve the unloading of models to itself.
            pb_utils.Logger.log_warn(f"{self._name} stays listed as ready: {error}")

    def close(self) -> None:
        """End the event loop, once every request has its answer."""
        self._flush()
        self._is_closing = True
        self._thread.join()


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


class TritonModel:
    """A model of either server: this project's own calls `load`, `infer` and `close`.

    Triton calls the other methods.

    Attributes:
        decoupled: whether a request may have several responses.
        interactive: whether requests may belong to sessions.
        bf16_inputs: names of the inputs that arrive as BF16.
    """

    decoupled = interactive = False
    bf16_inputs: Collection[str] = ()
    _host: TritonHost

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        """Load the model. Raises ValueError if that is impossible."""
        raise NotImplementedError

    def infer(self, request: InferRequest) -> Responses:
        """Yield the responses, each with whether it is the last. Raises ModelError.

        Closing it gives the request up.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End what the model has started."""

    @with_readable_errors
    def initialize(self, args: Args) -> None:
        """Load the model (called by Triton).

        Of a ValueError Triton reports the message, and the model stays unavailable.
        """
        self._host = TritonHost(args["model_name"])
        self.load(triton_arguments(args), self._host)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answer requests (called by Triton); None means that the answers follow later."""
        for each in requests:
            tensors = _request_tensors(each, self.bf16_inputs)
            request = InferRequest(
                tensors,
                tuple(each.requested_output_names()),
                turn=_turn(each, tensors) if self.interactive else None,
                is_canary=CANARY_PARAMETER in json.loads(each.parameters() or "{}"),
            )
            sender, answers = each.get_response_sender(), self.infer(request)
            self._host.start(self._host.answer(answers, request, sender, streams=self.decoupled))

    def finalize(self) -> None:
        """End the model (called by Triton)."""
        self.close()
        self._host.close()
