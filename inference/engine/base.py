"""Base class of the engines: a thread that accepts requests and runs planned steps on all ranks.

The scheduler decides what a step computes. When a rank exits or hangs, the requests in flight and
all later ones fail with the reason.
"""

from __future__ import annotations

import atexit
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Self

import torch
from torch import Tensor

from export_scripts.families.layout.architecture import Architecture
from export_scripts.ft.config_ini import read_config
from inference.decoding.rows import RequestError
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.engine.load import EngineLoad
from inference.engine.options import EngineOptions
from inference.engine.queued_request import PlannedStep, QueuedRequest, StepScheduler
from inference.ranks.base import StepResult
from inference.ranks.checks import check_ranks
from inference.ranks.plan import StepPlan
from inference.ranks.processes import threads_per_rank
from inference.ranks.rank_group import RankError, RankGroup
from inference.ranks.rendezvous import Rendezvous
from inference.ranks.settings import Placement, RankSettings
from inference.system.process_memory import give_back_memory

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0  # between pings of idle ranks
_WATCH_S = 0.1
_EXIT_WAIT_S = 1.0  # a connection breaks shortly before its peer process has exited
_STOPPED = "the engine was stopped"
_EXCHANGING = "weights are being exchanged; send the request again later"


# A step in flight, its pending result, and its start time.
_Launched = tuple[PlannedStep, StepResult, float]

# Engines of this process whose ranks use a GPU. cuBLAS keeps a workspace of 32 MiB for each stream,
# and recorded graphs hold its address: workspaces are freed with the last of the engines.
_gpu_engines: set[EngineBase] = set()
_gpu_lock = threading.Lock()


class EngineBase(ABC):
    """An engine that serves one FT folder; subclasses accept requests.

    The engine's thread sets the futures; their callbacks must be quick.

    Attributes:
        steps: Number of steps that all ranks have finished.
        queued_rows: Rows of all requests that have not begun.
        after_step: Called after the results of a step were reported.
        when_failed: Called once with the reason, after every request has failed with it.
        description: The capacity in words, set by `_fit`.
    """

    architecture: Architecture
    description: str

    def __init__(
        self,
        ft_dir: Path | str,
        placement: Placement | None = None,
        *,
        options: EngineOptions | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        """Read the folder's description; nothing is loaded before `start`.

        Args:
            ft_dir: The folder of weights, split for `placement.tp_size` ranks.
            placement: Sizes, types and device of the ranks.
            options: Budgets and bounds.
            rendezvous: Joins the ranks that a launcher started, possibly on several nodes; None
                starts the other ranks on this node.

        Raises:
            ValueError: Sizes, types or budgets do not fit the model or the machine, or the engine
                does not serve such a model.
        """
        self.options = options = options or EngineOptions()
        self._rendezvous = rendezvous
        self.family, self.config = read_config(Path(ft_dir))
        self.architecture = self._served_architecture()
        launch = None if rendezvous is None else rendezvous.place
        # Each process that a launcher started uses one device.
        needed_devices = None if launch is None else 1
        placement = check_ranks(
            self.architecture, placement or Placement(), needed_devices=needed_devices
        )
        local_ranks = placement.world_size if launch is None else launch.local_size
        settings = RankSettings(
            **asdict(placement),
            ft_dir=str(ft_dir),
            rank=0,
            threads=options.threads or threads_per_rank(local_ranks),
            device_index=None if launch is None else launch.local_rank,
            shared_memory=options.shared_memory,
            rank_timeout_s=options.rank_timeout_s,
        )
        self._settings = self._fit(settings)
        self._wake = threading.Condition()
        self._inbox: deque[QueuedRequest] = deque()
        self.steps = 0
        self.queued_rows = 0
        self.after_step: Callable[[], None] = lambda: None
        self.when_failed: Callable[[str], None] = _ignore
        self._arrivals = 0
        self._stopping = False
        self._failure: str | None = "the engine is not started"
        self._ready = threading.Event()
        self._next_dir: str | None = None  # folder of the weights to load next
        self._ranks: RankGroup | None = None
        self.scheduler: StepScheduler | None = None  # while ranks run
        self._last_finished = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    @abstractmethod
    def _served_architecture(self) -> Architecture:
        """Return the folder's architecture; raise ValueError if this engine cannot serve it."""

    @abstractmethod
    def _fit(self, settings: RankSettings) -> RankSettings:
        """Return the settings with the engine's sizes; raise ValueError if these do not fit."""

    def _read_limits(self, folder: str) -> None:  # noqa: B027 - encoders have none
        """Read the limits of requests from a folder."""

    @abstractmethod
    def _warm_up(self) -> tuple[StepPlan, Tensor | None]:
        """Return a step of one token, which warms the ranks up."""

    @abstractmethod
    def _make_scheduler(self) -> StepScheduler:
        """Return the scheduler of the requests."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Load the model on every rank and return once it can answer; process exit stops it.

        Raises:
            EngineFailedError: A rank could not load or connect; the message has every reason.
        """
        # A thread cut off inside torch at interpreter exit would abort the process.
        atexit.register(self.stop)
        self._thread.start()
        # Bounded: ranks load within start_timeout_s, and every wait between ranks has a timeout.
        self._ready.wait()
        if self._failure is not None:
            atexit.unregister(self.stop)
            self._thread.join()
            raise EngineFailedError(self._failure)
        if self._settings.layout.world_size > 1:
            self._watcher.start()
        logger.info("ready: %s", self.description)

    def exchange(self, ft_dir: Path) -> None:
        """Switch to the weights of another folder once all requests have ended.

        The cache is emptied. Requests that arrive during the exchange are refused.

        Raises:
            ValueError: The folder's config.ini differs from the current one; the engine continues
                with its current weights.
            EngineFailedError: A rank could not load; the engine is unusable from then on.
        """
        if read_config(ft_dir) != (self.family, self.config):
            raise ValueError(
                f"{ft_dir} holds another model than {self._settings.ft_dir}: their config.ini "
                "differ; start another engine for it"
            )
        with self._wake:
            if self._failure is not None:
                raise EngineFailedError(self._failure)
            self._ready.clear()
            self._next_dir = str(ft_dir)
            self._wake.notify_all()
        self._ready.wait()  # bounded as in `start`
        if self._failure is not None:
            raise EngineFailedError(self._failure)

    def stop(self) -> None:
        """Fail the requests in flight, end every rank, and free all memory."""
        atexit.unregister(self.stop)
        self.when_failed = _ignore
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join(self.options.rank_timeout_s)
        self._fail(_STOPPED)
        if self._thread.is_alive():
            # Bounded: a rank's computation ends, and every wait between ranks has a timeout.
            self._thread.join()
        if self._watcher.is_alive():
            self._watcher.join()

    def healthy(self) -> str | None:
        """Return None if requests can be answered, else the reason they cannot."""
        return self._failure

    def load(self) -> EngineLoad:
        """Return the load, queued rows included; may be called from any thread."""
        scheduler = self.scheduler
        load = EngineLoad() if scheduler is None else scheduler.load()
        return replace(load, waiting=self.queued_rows)

    def _queue(self, request: QueuedRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: The request would not fit into an empty queue.
            EngineBusyError: The queue is full.
            EngineFailedError: The engine cannot answer.
        """
        rows = len(request.waiting)
        with self._wake:
            if self._failure is not None:
                raise EngineFailedError(self._failure)
            limit = self.options.max_queued_rows
            if rows > limit:
                raise RequestError(
                    [f"{rows} rows exceed max_queued_rows={limit}; send fewer in a request"]
                )
            if self.queued_rows + rows > limit:
                raise EngineBusyError(
                    f"the queue is full: {self.queued_rows} rows wait, {rows} more would exceed "
                    f"max_queued_rows={limit}; send the request again later"
                )
            self.queued_rows += rows
            self._arrivals += 1
            request.arrival = self._arrivals
            self._inbox.append(request)
            self._wake.notify_all()

    def _run(self) -> None:
        """Start the ranks and serve until stopped or until a rank fails."""
        if self._settings.device == "cuda":
            with _gpu_lock:
                _gpu_engines.add(self)
        self._run_ranks()
        # No reference to the ranks is left; other engines of this process may need their memory.
        give_back_memory()
        if self._settings.device == "cuda":
            with _gpu_lock:
                _gpu_engines.remove(self)
                if not _gpu_engines:
                    torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        self._ready.set()

    def _run_ranks(self) -> None:
        ranks = self._ranks = RankGroup(
            self._settings,
            start_timeout_s=self.options.start_timeout_s,
            rendezvous=self._rendezvous,
        )
        try:
            ranks.start()
            self._serve_weights(ranks)
            while self._failure == _EXCHANGING:
                folder = str(self._next_dir)
                self.scheduler = None  # the new ranks' cache is empty
                ranks.exchange(folder)
                self._settings = replace(self._settings, ft_dir=folder)
                self._read_limits(folder)
                self._serve_weights(ranks)
            self._fail(self._failure or _STOPPED)
        except RankError as error:
            self._fail(str(error))
        except Exception as error:  # any failure ends the ranks
            logger.exception("the engine failed")
            deadline = monotonic() + _EXIT_WAIT_S
            while (problem := ranks.problem()) is None and monotonic() < deadline:
                sleep(_WATCH_S)
            self._fail(problem or f"{type(error).__name__}: {error}")
        ranks.end(grace_s=0)
        self._ranks = self.scheduler = None

    def _serve_weights(self, ranks: RankGroup) -> None:
        """Serve until stopped, or until an exchange of weights makes the engine refuse requests."""
        self.scheduler = self._make_scheduler()
        ranks.run(*self._warm_up())
        with self._wake:
            self._failure = self._next_dir = None
        self._ready.set()
        self._serve(ranks, self.scheduler)

    def _serve(self, ranks: RankGroup, scheduler: StepScheduler) -> None:
        under_way: _Launched | None = None
        while True:
            with self._wake:
                idle = not (scheduler.requests or self._inbox or self._stopping or under_way)
                if idle and self._next_dir is not None and not self._failure:
                    self._failure = _EXCHANGING
                    return
                if idle:
                    idle = not self._wake.wait(_HEARTBEAT_S)
                while self._inbox:
                    scheduler.add(self._inbox.popleft())
                if self._stopping:
                    break
                if self._failure is not None:
                    return
            if idle:
                ranks.ping()
                continue
            step = scheduler.plan(under_way=under_way is not None)
            with self._wake:  # other threads add to the inbox
                pending = (*scheduler.requests, *self._inbox)
                self.queued_rows = sum(len(request.waiting) for request in pending)
            launched = None if step is None else self._launch(ranks, scheduler, step)
            if under_way is not None:
                self._finish(ranks, scheduler, under_way)
            under_way = launched
            if under_way is not None and not under_way[0].overlaps:
                self._finish(ranks, scheduler, under_way)
                under_way = None
        ranks.stop()

    def _launch(
        self, ranks: RankGroup, scheduler: StepScheduler, step: PlannedStep
    ) -> _Launched | None:
        """Start a step on the ranks; on a GPU it may still run when this returns."""
        began = perf_counter()
        try:
            return step, ranks.run(step.plan, step.embeddings), began
        except Exception as error:  # the answer to the requests that run
            if self._settings.layout.world_size > 1:
                raise  # the ranks no longer agree on the next step
            self._fail_step(scheduler, step, error)
            return None

    def _finish(self, ranks: RankGroup, scheduler: StepScheduler, launched: _Launched) -> None:
        step, result, began = launched
        began = max(began, self._last_finished)
        try:
            ranks.wait(result)
            self.steps += 1
            self._last_finished = perf_counter()
            scheduler.finish(step, result, seconds=self._last_finished - began)
            self.after_step()
        except Exception as error:  # the answer to the requests that run
            self._fail_step(scheduler, step, error)

    def _fail_step(self, scheduler: StepScheduler, step: PlannedStep, error: Exception) -> None:
        logger.error("a step failed", exc_info=error)
        error = error.with_traceback(None)  # its frames would keep the model alive
        # Other running requests may need what this step should have stored, such as a prefix.
        begun = [request for request in scheduler.requests if request.has_begun]
        for request in dict.fromkeys((*step.owners, *begun)):
            request.fail(error)
            if request in scheduler.requests:
                scheduler.drop(request)

    def _watch(self) -> None:
        """Watch for ranks that exit or hang while the engine's thread waits for them."""
        while not self._stopping:
            ranks = self._ranks
            if ranks is not None and self._failure is None and (problem := ranks.problem()):
                self._fail(problem)
            sleep(_WATCH_S)

    def _fail(self, reason: str) -> None:
        """Fail all requests in flight with the reason, and end the other ranks."""
        with self._wake:
            # Keep the first reason: later failures follow from it.
            if self._failure is None or self._stopping or not self._ready.is_set():
                self._failure = reason
            waiting = list(self._inbox)
            self._inbox.clear()
            self.queued_rows = 0
            self._wake.notify_all()
        scheduler, ranks = self.scheduler, self._ranks  # another thread may end both
        for request in [*waiting, *(scheduler.requests if scheduler is not None else ())]:
            request.fail(EngineFailedError(reason))
        if ranks is not None:
            ranks.end(grace_s=0)
        when_failed, self.when_failed = self.when_failed, _ignore
        when_failed(reason)


def _ignore(_: str) -> None:
    """Do nothing; the default of `when_failed`."""
