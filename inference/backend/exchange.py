"""A request on its way through a model, and what a model needs of its host.

The host is this project's own server, or tritonserver with its Python backend.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from inference.decoding.rows import SessionTurn

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]
# A host's code for an error of the request itself.
INVALID = "INVALID_ARG"


class Exchange(ABC):
    """One request in progress; it is answered from any thread.

    Attributes:
        tensors: Inputs by name; those of type BF16, which numpy lacks, as FP32.
        wanted: Names of the outputs that the client wants.
        turn: Place of the request in a session, None without one.
        is_canary: Sent by the server's owner, to see whether the model answers.
        queued_s: How long the request waited for its first slot, once it is answered.
        began: On the clock `time.perf_counter`.
        steps: Takes, after each step of a generation, the new tokens of each row in place of
            whole responses; None for responses.
    """

    def __init__(
        self,
        tensors: dict[str, Array],
        wanted: Collection[str],
        *,
        turn: SessionTurn | None = None,
        is_canary: bool = False,
    ) -> None:
        self.tensors, self.wanted = tensors, wanted
        self.turn, self.is_canary = turn, is_canary
        self.began = time.perf_counter()
        self.queued_s = 0.0
        self.steps: Callable[[Sequence[Sequence[int]]], None] | None = None

    @abstractmethod
    def is_cancelled(self) -> bool:
        """Return whether the client left."""

    @abstractmethod
    def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
        """Send one response, of arrays or torch tensors; nothing is sent after the final one."""

    @abstractmethod
    def fail(self, message: str, code: str) -> None:
        """Answer with an error, which ends the exchange; `code` is one of TritonError's."""


class ModelHost(Protocol):
    """The server around a model."""

    @property
    def metric_family(self) -> Any:
        """What declares metrics, as Triton's class MetricFamily does."""

    def warn(self, message: str) -> None:
        """Write to the server's log."""

    def post(self, call: Callable[[], None]) -> None:
        """Call a function soon, in order, and in another thread: an engine waits for no client."""

    def leave(self, reason: str) -> None:
        """Take a model whose engine has failed out of service, after the posted calls."""

    def close(self) -> None:
        """End what the host has started for the model, after the posted calls."""
