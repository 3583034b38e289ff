"""Asynchronous base class of the models with an engine.

`take` never waits, which lets one instance hold any number of requests. A failing request gets
an error, the others their answers; when its engine fails, a model leaves service.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.errors import CheckpointMismatchError
from export_scripts.ft.config_ini import read_config
from export_scripts.ft.identity import served_identity
from export_scripts.ft.validation import validate_directory
from inference.backend.arguments import ModelArguments
from inference.backend.exchange import INVALID, Exchange, ModelHost
from inference.backend.instances import Instance, occupy
from inference.backend.metrics import ModelMetrics
from inference.backend.model_settings import read_settings
from inference.backend.triton_model import TritonEngineModel
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.ranks.launched_rank import open_rendezvous, started_place
from inference.ranks.processes import early_workers
from inference.system.launch_environment import RENDEZVOUS_VARIABLE
from inference.system.process_memory import keep_loaded
from inference.system.supervision import BUSY

if TYPE_CHECKING:
    from inference.engine.base import EngineBase

_WATCH_S = 0.1
# Python's lock among threads. With Python's own 5 ms new tokens wait while the engine's thread
# plans the next step.
_SWITCH_S = 0.0005
# A check whether a client has left takes 0.1 ms; this many are checked at a time.
_ASKED_AT_ONCE = 64
# Triton's code for an error, and the reason in the metrics.
_FAILURES: dict[type[Exception], tuple[str, str]] = {
    ValueError: (INVALID, "invalid"),
    EngineBusyError: ("UNAVAILABLE", "busy"),
    EngineFailedError: ("UNAVAILABLE", "unavailable"),
}


class EngineModel(TritonEngineModel):
    """Base of the models with an engine; they add `engine_class` and `submit`.

    `engine_class` is `module:class`; the module imports torch. `served_by` has the types of weights
    that can serve a model_type, where that is not its own.
    """

    engine_class: ClassVar[str]
    served_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    engine: EngineBase[Any]

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        """Start the engine, and before it the other ranks of this node.

        The modules of this package import torch inside functions only, so that all ranks import it
        at once. Raises ValueError for weights that are invalid or do not match config.pbtxt.
        """
        sys.setswitchinterval(_SWITCH_S)
        self.host, self.name = host, arguments.name
        self.settings = read_settings(arguments)
        self.decoupled = arguments.decoupled
        self.interactive = arguments.session_idle_s is not None
        self.bf16_inputs = arguments.bf16_inputs
        for key in self.settings.unknown:
            host.warn(f"parameter {key} is unknown and has no effect")
        for key in self.settings.without_effect:
            host.warn(f"parameter {key} has no effect in this engine")
        self._check_weights()
        self._take_place(arguments.instance)
        self.engine = self._started_engine()
        keep_loaded()
        self.metrics = ModelMetrics(
            host.metric_family,
            self.name,
            arguments.instance,
            self.engine.load,
            served_identity(self.settings.checkpoint_path, arguments.parameters),
        )
        self._running: dict[Exchange, Future[Any]] = {}
        self._next_check = 0  # index of the running request to check next
        self._canary_steps = -1  # of the engine, at the last canary that was answered BUSY
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def _take_place(self, instance: Instance) -> None:
        """Keep to the devices of one instance. Raises ValueError over several nodes."""
        placement = self.settings.placement
        if instance.count > 1 and os.environ.get(RENDEZVOUS_VARIABLE):
            raise ValueError(
                f"{self.name}: instance_group asks for {instance.count} instances, and the ranks "
                "of one are spread over nodes; set count to 1, and start a server for each."
            )
        first, sharing = occupy(instance, world_size=placement.world_size, device=placement.device)
        self.settings = replace(
            self.settings,
            engine=replace(self.settings.engine, sharing_engines=sharing),
            placement=replace(placement, first_device=first),
        )

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

    def take(self, exchange: Exchange) -> None:
        """Queue a request; it is answered later."""
        if exchange.is_canary:
            steps, before = self.engine.steps, self._canary_steps
            self._canary_steps = steps
            if self._running and steps != before:  # the engine makes progress
                exchange.fail(BUSY, "UNAVAILABLE")
                return
        try:
            future, answer = self.submit(exchange)
        except Exception as error:
            self._fail(exchange, error, note=self.metrics.refused)
        else:
            self._follow(exchange, future, answer)

    def close(self) -> None:
        """Stop the engine."""
        self._stopping.set()
        self.metrics.stop()
        self.engine.stop()
        self._watcher.join()
        self.host.close()

    def _follow(
        self, exchange: Exchange, future: Future[Any], answer: Callable[[Any], None]
    ) -> None:
        with self._lock:
            self._running[exchange] = future

        def finished(done: Future[Any]) -> None:
            with self._lock:
                self._running.pop(exchange, None)
            # After the tokens that it consists of, which were posted before.
            self.host.post(partial(self._send_result, exchange, done, answer))

        future.add_done_callback(finished)

    def _send_result(
        self, exchange: Exchange, future: Future[Any], answer: Callable[[Any], None]
    ) -> None:
        try:
            times = getattr(future.result(), "times", None)
            exchange.queued_s = getattr(times, "queued_s", None) or 0.0
            answer(future.result())
        except CancelledError:
            exchange.fail("the request was cancelled", "CANCELLED")
            self.metrics.ended("cancelled")
        except Exception as error:  # found by the engine's thread, such as an ended session
            self._fail(exchange, error, note=lambda _: self.metrics.ended("failed"))
        else:
            if not exchange.is_canary:
                seconds = time.perf_counter() - exchange.began
                self.metrics.completed(seconds, times)

    def _fail(self, exchange: Exchange, error: Exception, *, note: Callable[[str], None]) -> None:
        """Answer a request with its failure, whatever that is, and note the reason."""
        for kind, (code, reason) in _FAILURES.items():
            if isinstance(error, kind):
                exchange.fail(str(error), code)
                note(reason)
                return
        exchange.fail(str(error) or type(error).__name__, "INTERNAL")
        self.metrics.ended("failed")

    def _watch(self) -> None:
        """Watch for clients that left, and for a failed engine."""
        while not self._stopping.wait(_WATCH_S):
            self._drop_cancelled()
            if (reason := self.engine.healthy()) is not None:
                self.host.leave(reason)
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
