"""Base class of the engines: start, health, stop, and cancellation of a request."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from export_scripts.families.layout.architecture import Architecture
from inference.engine.load import EngineLoad
from inference.engine.loop import EngineLoop
from inference.engine.options import EngineOptions
from inference.ranks.checks import check_ranks
from inference.ranks.processes import threads_per_rank
from inference.ranks.rendezvous import Rendezvous
from inference.ranks.settings import Placement, RankSettings

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT", bound="EngineBase")


class EngineBase(ABC):
    """Serves one FT folder; subclasses read its description and accept requests.

    The engine's own thread sets the futures; their callbacks must be quick.
    """

    _loop: EngineLoop[Any]

    @abstractmethod
    def describe(self) -> str:
        """Return a description of the engine's capacity."""

    def __enter__(self: EngineT) -> EngineT:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Load the model on every rank, until it can answer.

        Raises:
            EngineFailedError: Some rank could not load or connect; every reason is given.
        """
        self._loop.start()
        logger.info("ready: %s", self.describe())

    def stop(self) -> None:
        """Fail the requests in flight, end every rank, and give all memory back."""
        self._loop.stop()

    def healthy(self) -> str | None:
        """Return None if requests can be answered, else the reason why not."""
        return self._loop.healthy()

    @property
    def steps(self) -> int:
        """Steps that all ranks have finished since the start."""
        return self._loop.steps

    @property
    def queued_rows(self) -> int:
        """Rows of all requests that have not begun."""
        return self._loop.queued_rows

    def load(self) -> EngineLoad:
        """Return how much waits and runs; may be called from any thread."""
        return EngineLoad(waiting=self.queued_rows)

    def cancel(self, future: Future[Any]) -> None:
        """Cancel a request: at the next step its work stops and its memory is freed."""
        future.cancel()


def checked_placement(
    architecture: Architecture, placement: Placement | None, rendezvous: Rendezvous | None
) -> Placement:
    """Return the checked placement of an engine's ranks; raises as `check_ranks`."""
    return check_ranks(
        architecture,
        placement or Placement(),
        # Each process that a launcher started uses one device.
        needed_devices=None if rendezvous is None else 1,
    )


def rank_settings(
    ft_dir: Path | str,
    placement: Placement,
    options: EngineOptions,
    rendezvous: Rendezvous | None,
    **cache: Any,
) -> RankSettings:
    """Return the settings of rank 0; `cache` holds the remaining fields."""
    launch = None if rendezvous is None else rendezvous.place
    local_ranks = placement.world_size if launch is None else launch.local_size
    return RankSettings(
        **asdict(placement),
        ft_dir=str(ft_dir),
        rank=0,
        threads=options.threads or threads_per_rank(local_ranks),
        device_index=None if launch is None else launch.local_rank,
        shared_memory=options.shared_memory,
        rank_timeout_s=options.rank_timeout_s,
        **cache,
    )
