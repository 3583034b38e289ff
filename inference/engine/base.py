"""The life of an engine, whatever it answers: start, health, stop, and giving up a request."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from inference.engine.loop import EngineLoop
from inference.engine.options import EngineOptions
from inference.ranks.rank_group import threads_per_rank
from inference.ranks.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT", bound="EngineBase")


class EngineBase(ABC):
    """Serves one FT folder; subclasses read its description and take requests.

    Futures are answered from the engine's own thread; what they call must be quick.
    """

    _loop: EngineLoop[Any]

    @abstractmethod
    def describe(self) -> str:
        """Return what the engine can hold, in words."""

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
        """Load the model on every rank; return when it can answer.

        Raises:
            EngineFailedError: Some rank could not load or connect; every reason is given.
        """
        self._loop.start()
        logger.info("ready: %s", self.describe())

    def stop(self) -> None:
        """Fail what is in flight and end every rank."""
        self._loop.stop()

    def healthy(self) -> str | None:
        """Return None if requests can be answered, else the reason why not."""
        return self._loop.healthy()

    @property
    def queued_rows(self) -> int:
        """Rows that are not begun, of all requests."""
        return self._loop.queued_rows

    def cancel(self, future: Future[Any]) -> None:
        """Give up a request: at the next step its work stops and its memory is free."""
        future.cancel()


def rank_place(
    options: EngineOptions, world_size: int, rendezvous: Rendezvous | None
) -> dict[str, Any]:
    """Return the fields of rank 0's `RankSettings` that follow from where the ranks run."""
    local_ranks = world_size if rendezvous is None else rendezvous.place.local_size
    return {
        "threads": options.threads or threads_per_rank(local_ranks),
        "device_index": None if rendezvous is None else rendezvous.place.local_rank,
        "shared_memory": options.shared_memory,
        "rank_timeout_s": options.rank_timeout_s,
    }
