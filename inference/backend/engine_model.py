"""Asynchronous base class of the models with an engine in Triton's Python backend.

`execute` never waits, which lets one instance hold any number of requests. A failing request gets
an error, the others their answers; when its engine fails, a model leaves service.
"""

from __future__ import annotations

import json
import os
import pkgutil
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.errors import CheckpointMismatchError
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.validation import validate_directory
from inference.backend.instances import Instance, occupy
from inference.backend.metrics import ModelMetrics
from inference.backend.model_settings import read_settings
from inference.backend.triton_model import ModelArguments, error_response, with_readable_errors
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.launch_environment import RENDEZVOUS_VARIABLE
from inference.process_memory import keep_loaded
from inference.ranks.launched_rank import open_rendezvous, started_place
from inference.ranks.processes import early_workers
from inference.streams import STREAM_PARAMETER, StreamSender
from inference.supervision import BUSY, CANARY_PARAMETER, REPORTS_VARIABLE, report_end

if TYPE_CHECKING:
    from inference.engine.base import EngineBase

_WATCH_S = 0.1
_FLUSH_S = 2.0  # for handing the answers of a failed engine to the server
_SEND_S = 0.4  # for the server to send them
# Of Python's lock among threads. With Python's own 5 ms new tokens wait while the engine's thread
# plans the next step.
_SWITCH_S = 0.0005
# A check whether a client has left takes 0.1 ms; this many are checked at a time.
_ASKED_AT_ONCE = 64
# Triton's code for an error, and the reason in the metrics.
_FAILURES: dict[type[Exception], tuple[str, str]] = {
    ValueError: ("INVALID_ARG", "invalid"),
    EngineBusyError: ("UNAVAILABLE", "busy"),
    EngineFailedError: ("UNAVAILABLE", "unavailable"),
}


class Exchange:
    """A Triton request in progress, the outputs it wants, and its response sender.

    Where `stream` is a name, the front takes new tokens from there; "" asks for the whole answer.
    """

    def __init__(self, request: Any, *, streams: bool = False) -> None:
        self.request = request
        self._streams = streams
        self.sender = request.get_response_sender()
        self.wanted = tuple(request.requested_output_names())
        self.began = time.perf_counter()
        parameters = json.loads(request.parameters() or "{}")
        self.is_canary = CANARY_PARAMETER in parameters
        has_front = bool(os.environ.get(REPORTS_VARIABLE))
        self.stream = parameters.get(STREAM_PARAMETER) if has_front else None
        self._closed = False
        self._lock = threading.Lock()

    def is_cancelled(self) -> bool:
        """Return whether the client left.

        After the final response the server (2.51) has dropped the request: to ask it would end it.
        """
        with self._lock:
            return not self._closed and bool(self.sender.is_cancelled())

    def send(self, message: Any, *, final: bool) -> None:
        """Send one response; nothing is sent after the final one."""
        import triton_python_backend_utils as pb_utils

        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            if self._closed:
                return
            self._closed = final
            try:
                self.sender.send(message, flags=flags)
            except pb_utils.TritonModelException as error:
                pb_utils.Logger.log_warn(f"a response could not be sent: {error}")

    def fail(self, message: str, code: str) -> None:
        """Answer with an error, which ends the exchange; `code` is one of TritonError's.

        Streams carry no code: the text names it unless the request itself is wrong.
        """
        if self._streams and code != "INVALID_ARG":
            message = f"{code}: {message}"
        self.send(error_response(message, code), final=True)


class EngineModel:
    """Base of the models with an engine; they add `engine_class` and `submit`.

    `engine_class` is `module:class`; the module imports torch. `served_by` has the types of weights
    that can serve a model_type, where that is not its own.
    """

    engine_class: ClassVar[str]
    served_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    engine: EngineBase[Any]

    @with_readable_errors
    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the engine (called by Triton), and before it the other ranks of this node.

        The modules of this package import torch inside functions only, so that all ranks import it
        at once. Of a ValueError, for weights that are invalid or do not match config.pbtxt, Triton
        reports the message, and the model stays unavailable.
        """
        sys.setswitchinterval(_SWITCH_S)
        arguments = ModelArguments(args)
        self.name = args["model_name"]
        self.settings = read_settings(arguments)
        self.decoupled = arguments.decoupled
        self.interactive = arguments.session_idle_s is not None
        self.bf16_inputs = arguments.bf16_inputs
        for key in self.settings.unknown:
            self.warn(f"parameter {key} is unknown and has no effect")
        for key in self.settings.without_effect:
            self.warn(f"parameter {key} has no effect in this engine")
        self._check_weights()
        self._take_place(arguments.instance)
        self.engine = self._started_engine()
        keep_loaded()
        self.metrics = ModelMetrics(self.name, arguments.instance, self.engine.load)
        self._running: dict[Exchange, Future[Any]] = {}
        self._next_check = 0  # index of the running request to check next
        self._canary_steps = -1  # of the engine, at the last canary that was answered BUSY
        self._lock = threading.Lock()
        self.streams = StreamSender()
        self.engine.after_step = self.streams.flush
        # Of what sends responses; the thread of these calls it, in order.
        self.outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._deliver, name="responses", daemon=True),
            threading.Thread(target=self._watch, name="watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def warn(self, message: str) -> None:
        """Write to the server's log."""
        import triton_python_backend_utils as pb_utils

        pb_utils.Logger.log_warn(f"{self.name}: {message}")

    def _take_place(self, instance: Instance) -> None:
        """Keep to the devices of one instance. Raises ValueError over several nodes."""
        placement = self.settings.placement
        if instance.count > 1 and os.environ.get(RENDEZVOUS_VARIABLE):
            raise ValueError(
                f"{self.name}: instance_group asks for {instance.count} instances, and the ranks "
                "of one are spread over nodes; set count to 1, and start a server for each."
            )
        sharing = occupy(instance, world_size=placement.world_size, device=placement.device)
        engine = replace(self.settings.engine, sharing_engines=sharing)
        self.settings = replace(self.settings, engine=engine)

    def _check_weights(self) -> None:
        """Check that the model can serve the folder of weights, and that it matches its config.ini.

        Every rank checks again when it loads; this early check is quick and reports a problem once.
        """
        folder, own_type = self.settings.checkpoint_path, self.settings.model_type
        if problems := validate_directory(folder, checksums=False):
            raise CheckpointMismatchError([f"{folder} cannot be served:", *problems])
        family, _ = read_config(folder)
        if family.model_type not in self.served_by.get(own_type, (own_type,)):
            raise ValueError(
                f"model_type={own_type}, but {folder} holds a {family.model_type} model; export it "
                "again."
            )

    def _started_engine(self) -> EngineBase[Any]:
        placement, options = self.settings.placement, self.settings.engine
        folder, count = self.settings.checkpoint_path, placement.world_size
        with ExitStack() as other_ranks:
            if started_place(count) is None:  # they run here
                other_ranks.enter_context(early_workers(folder, count, options.threads))
            # Not None where a scheduler has started the ranks on several nodes.
            rendezvous = open_rendezvous(count, timeout_s=options.rank_timeout_s)
            engine: EngineBase[Any] = pkgutil.resolve_name(self.engine_class)(
                folder, placement=placement, options=options, rendezvous=rendezvous
            )
            engine.start()
        return engine

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue a request in the engine; return its future and the function that sends its result.

        Raises ValueError for an invalid one, EngineBusyError or EngineFailedError.
        """
        raise NotImplementedError

    def execute(self, requests: Sequence[Any]) -> None:
        """Queue requests (called by Triton); None means that the answers follow later."""
        for request in requests:
            exchange = Exchange(request, streams=self.decoupled)
            if exchange.is_canary:
                steps, before = self.engine.steps, self._canary_steps
                self._canary_steps = steps
                if self._running and steps != before:  # the engine makes progress
                    exchange.fail(BUSY, "UNAVAILABLE")
                    continue
            try:
                future, answer = self.submit(exchange)
            except Exception as error:
                self._fail(exchange, error, note=self.metrics.refused)
            else:
                self._follow(exchange, future, answer)

    def finalize(self) -> None:
        """Stop the engine (called by Triton)."""
        self._stopping.set()
        self.metrics.stop()
        self.engine.stop()
        self.streams.stop()
        self.outbox.put(None)
        for thread in self._threads:
            thread.join()

    def _follow(
        self, exchange: Exchange, future: Future[Any], answer: Callable[[Any], None]
    ) -> None:
        with self._lock:
            self._running[exchange] = future

        def finished(done: Future[Any]) -> None:
            with self._lock:
                self._running.pop(exchange, None)
            send = partial(self._send_result, exchange, done, answer)
            # An answer follows the tokens that it consists of.
            self.streams.after(partial(self.outbox.put, send))

        future.add_done_callback(finished)

    def _send_result(
        self, exchange: Exchange, future: Future[Any], answer: Callable[[Any], None]
    ) -> None:
        try:
            answer(future.result())
        except CancelledError:
            exchange.fail("the request was cancelled", "CANCELLED")
            self.metrics.ended("cancelled")
        except Exception as error:  # found by the engine's thread, such as an ended session
            self._fail(exchange, error, note=lambda _: self.metrics.ended("failed"))
        else:
            if not exchange.is_canary:
                seconds = time.perf_counter() - exchange.began
                self.metrics.completed(seconds, getattr(future.result(), "times", None))

    def _fail(self, exchange: Exchange, error: Exception, *, note: Callable[[str], None]) -> None:
        """Answer a request with its failure, whatever that is, and note the reason."""
        for kind, (code, reason) in _FAILURES.items():
            if isinstance(error, kind):
                exchange.fail(str(error), code)
                note(reason)
                return
        exchange.fail(str(error) or type(error).__name__, "INTERNAL")
        self.metrics.ended("failed")

    def _deliver(self) -> None:
        """Send responses in order; the engine never waits for a client."""
        for send in iter(self.outbox.get, None):
            send()

    def _watch(self) -> None:
        """Watch for clients that left, a failed engine, and the end of the server."""
        parent = os.getppid()
        while not self._stopping.wait(_WATCH_S):
            self._drop_cancelled()
            if os.getppid() != parent:
                os._exit(1)  # the server is gone; the workers follow this process
            if (reason := self.engine.healthy()) is not None:
                self._leave_service(reason)
                return

    def _drop_cancelled(self) -> None:
        """Check some of the running requests, in rotation."""
        with self._lock:
            running = list(self._running.items())
        first = self._next_check if self._next_check < len(running) else 0
        self._next_check = first + _ASKED_AT_ONCE
        for exchange, future in running[first : self._next_check]:
            if exchange.is_cancelled():
                future.cancel()

    def _leave_service(self, reason: str) -> None:
        """End this process, and thereby the server, once every request has its answer.

        The supervisor ends a server that has lost a model, and the deploy stage restarts it. A
        server without a supervisor unloads the model, which is then listed as not ready.
        """
        import triton_python_backend_utils as pb_utils

        text = f"{self.name} is out of service: {reason}"
        pb_utils.Logger.log_error(text)
        if report_end(text):
            flushed = threading.Event()
            self.streams.after(partial(self.outbox.put, flushed.set))
            flushed.wait(_FLUSH_S)
            time.sleep(_SEND_S)
            os._exit(1)
        try:
            pb_utils.unload_model(self.name)
        except pb_utils.TritonModelException as error:
            # The server's own options reserve the unloading of models to itself.
            pb_utils.Logger.log_warn(f"{self.name} stays listed as ready: {error}")
