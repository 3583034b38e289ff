"""Asynchronous base class of the models with an engine.

One instance holds any number of requests. A failing request gets an error, the others their
answers; when its engine fails, a model leaves service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.identity import served_identity
from export_scripts.ft.validation import validate_directory
from foundations.errors import CheckpointMismatchError
from inference.backend.arguments import ModelArguments
from inference.backend.instances import Instance, occupy
from inference.backend.metrics import ModelMetrics
from inference.backend.model_settings import read_settings
from inference.backend.requests import (
    InferRequest,
    ModelError,
    ModelHost,
    Outputs,
    Responses,
    Submitted,
)
from inference.backend.triton_model import TritonModel
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.ranks.launched_rank import open_rendezvous
from inference.ranks.processes import fork_workers, start_workers
from inference.system.launch_environment import RENDEZVOUS_VARIABLE
from inference.system.process_memory import keep_loaded
from inference.system.supervision import BUSY

if TYPE_CHECKING:
    from inference.engine.base import EngineBase

# Python's lock among threads. With Python's own 5 ms new tokens wait while the engine's thread
# plans the next step.
_SWITCH_S = 0.0005
# Larger requests are read in a thread.
_INLINE_BYTES = 16 << 10
# The code of an error, and the reason in the metrics.
_FAILURES: dict[type[Exception], tuple[str, str]] = {
    ValueError: ("INVALID_ARGUMENT", "invalid"),
    EngineBusyError: ("UNAVAILABLE", "busy"),
    EngineFailedError: ("UNAVAILABLE", "unavailable"),
}


class EngineModel(TritonModel):
    """Base of the models with an engine; they add `engine_class` and `submit`.

    `engine_class` is `module:class`; the module imports torch. `served_by` has the types of weights
    that can serve a model_type, where that is not its own.

    Attributes:
        running: requests that the engine has taken, and not answered.
    """

    engine_class: ClassVar[str]
    served_by: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    engine: EngineBase
    former: EngineModel | None = None  # whose engine this one takes over, if their models agree
    running: set[AskedEngine]

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        """Start the engine.

        The modules of this package import torch inside functions only: text models need none.
        Raises ValueError for weights that are invalid or do not match config.pbtxt.
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
        self.engine = self._taken_engine() or self._started_engine()
        keep_loaded()
        self.metrics = ModelMetrics(
            self.name,
            arguments.instance,
            self.engine.load,
            served_identity(self.settings.checkpoint_path, arguments.parameters),
        )
        host.show(self.metrics)
        self.running = set()
        self._canary_steps = -1  # of the engine, at the last canary that was answered BUSY
        self.engine.when_failed = host.leave
        if (reason := self.engine.healthy()) is not None:  # already
            host.leave(reason)

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

    def _taken_engine(self) -> EngineBase | None:
        """Return the former model's engine with the weights of this one, None without.

        One whose settings or sizes are others is stopped. Raises EngineFailedError.
        """
        former, self.former = self.former, None
        if former is None:
            return None
        folder = self.settings.checkpoint_path
        if type(former) is type(self) and (
            replace(former.settings, checkpoint_path=folder) == self.settings
        ):
            try:
                former.engine.exchange(folder)
            except ValueError as error:
                self.host.warn(f"{error}: a new engine is started")
            else:
                return former.engine
        former.engine.stop()
        return None

    def _started_engine(self) -> EngineBase:
        placement, options = self.settings.placement, self.settings.engine
        folder, count = self.settings.checkpoint_path, placement.world_size
        # Not None where a scheduler has started the ranks on several nodes.
        rendezvous = open_rendezvous(count, timeout_s=options.rank_timeout_s)
        if rendezvous is None:
            start_workers(folder, count)
        engine: EngineBase = pkgutil.resolve_name(self.engine_class)(
            folder, placement=placement, options=options, rendezvous=rendezvous
        )
        engine.start()
        return engine

    def submit(self, request: InferRequest, on_step: Callable[[Any], None]) -> Submitted:
        """Queue a request in the engine; return its future, and what makes outputs of its result.

        `on_step` may be called with what a step has made, of which the same function makes outputs
        too, or None where there are none yet. Raises ValueError for an invalid request,
        EngineBusyError or EngineFailedError.
        """
        raise NotImplementedError

    async def infer(self, request: InferRequest) -> Responses:
        """Yield the responses, see `TritonModel`."""
        came: asyncio.Queue[Any] = asyncio.Queue()

        def put(step: Any) -> None:  # from any thread
            self.host.post(partial(came.put_nowait, step))

        asked = AskedEngine(self, request, put)
        try:
            if asked.is_large:
                await asyncio.to_thread(asked.submit)
            else:
                asked.submit()
            final = False
            while not final:
                outputs, final = asked.response(await came.get())
                if outputs is not None:
                    yield outputs, final
        finally:
            asked.end()

    def check_progress(self) -> None:
        """Refuse a canary where the engine is busy, and has made steps since the last one."""
        steps, before = self.engine.steps, self._canary_steps
        self._canary_steps = steps
        if self.running and steps != before:
            raise ModelError(BUSY, "UNAVAILABLE")

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop()


def fork_ranks(arguments: ModelArguments) -> None:
    """Fork the other ranks of a model from this process, see `fork_workers`.

    Those of several instances, which have cores or GPUs of their own, start later; those on several
    nodes are there.
    """
    with contextlib.suppress(ValueError):  # the model says what is wrong
        settings = read_settings(arguments)
        if arguments.instance.count == 1 and not os.environ.get(RENDEZVOUS_VARIABLE):
            fork_workers(settings.checkpoint_path, settings.placement.world_size)


class AskedEngine:
    """One request to an engine, whose thread puts what it makes where the host will read it.

    Attributes:
        queued_s: seconds in the engine's queue, once the last response is made.
    """

    queued_s = 0.0

    def __init__(
        self, model: EngineModel, request: InferRequest, put: Callable[[Any], None]
    ) -> None:
        """`put` is called from any thread: with each step, and at last with None."""
        self._model, self._request, self._put = model, request, put
        self._began = time.perf_counter()
        self._future: Future[Any] = Future()  # of a refusal, or else the engine's
        self._outputs_of: Callable[[Any], Outputs | None] = lambda _: None
        self._outcome = "cancelled"
        self._is_refused = self._is_given_up = False
        self._submitting = threading.Lock()  # a first step may come before it is submitted

    @property
    def is_large(self) -> bool:
        """Whether it takes some time to read."""
        return sum(each.nbytes for each in self._request.tensors.values()) > _INLINE_BYTES

    def submit(self) -> None:
        """Queue it; a refusal is its response."""
        with self._submitting:
            try:
                if self._request.is_canary:
                    self._model.check_progress()
                self._future, self._outputs_of = self._model.submit(self._request, self._put)
                self._model.running.add(self)
            except Exception as error:  # whatever it is, it is this request's answer alone
                self._is_refused, self._future = True, Future()
                self._future.set_exception(error.with_traceback(None))  # which holds this one
        # After the steps that it consists of, which were put before.
        self._future.add_done_callback(lambda _: self._put(None))
        if self._is_given_up:  # while it was read
            self._free()

    def response(self, step: Any) -> tuple[Outputs | None, bool]:
        """Return the outputs of what was put, None for none, and whether they are the last.

        Raises ModelError.
        """
        with self._submitting:
            pass
        try:
            if step is not None:
                return self._outputs_of(step), False
            result = self._future.result()
            times = getattr(result, "times", None)
            self.queued_s = getattr(times, "queued_s", None) or 0.0
            last = self._outputs_of(result)
        except CancelledError:
            raise ModelError("the request was cancelled", "CANCELLED") from None
        except ModelError:  # a canary's
            self._outcome = ""
            raise
        except Exception as error:  # a refusal, or found by the engine's thread
            answer, reason = _failure(error)
            self._outcome = "failed"
            if self._is_refused and reason:
                self._outcome = ""
                self._model.metrics.refused(reason)
            raise answer from None
        assert last is not None, "the last step is never reported on its own"
        self._outcome = ""
        if not self._request.is_canary:
            self._model.metrics.completed(time.perf_counter() - self._began, times)
        return last, True

    def end(self) -> None:
        """Give up what is not finished; called once."""
        self._is_given_up = True
        self._free()
        if self._outcome and not (self._request.is_canary and self._outcome == "cancelled"):
            self._model.metrics.ended(self._outcome)

    def _free(self) -> None:
        self._future.cancel()
        self._model.running.discard(self)


def _failure(error: Exception) -> tuple[ModelError, str]:
    """Return the answer to a request that has failed; of one that is refused also the reason."""
    for kind, (code, reason) in _FAILURES.items():
        if isinstance(error, kind):
            return ModelError(str(error), code), reason
    return ModelError(str(error) or type(error).__name__, "INTERNAL"), ""
