"""Requests to a model, and the server around it: this project's own, or tritonserver's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from inference.backend.metrics import ModelMetrics
    from inference.decoding.rows import SessionTurn

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Array]
Outputs = Mapping[str, Any]  # arrays or torch tensors by name
Responses = AsyncGenerator[tuple[Outputs, bool], None]  # each with whether it is the last
# The future of a request in an engine, and what makes outputs of its steps and its result,
# None where there are none yet.
Submitted = tuple[Future[Any], Callable[[Any], Outputs | None]]
TOKENS = "tokens"  # the only output where a request wants tokens


class ModelError(Exception):
    """A model does not answer a request. `code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class InferRequest:
    """One request to a model, whatever protocol it came by.

    Attributes:
        tensors: inputs by name; those of type BF16, which numpy lacks, as FP32.
        wanted: names of outputs, none for all of them.
        turn: its place in a session, None without one.
        id: chosen by the client.
        is_canary: sent by the server itself, to see whether the model answers.
        streams: whether a generation answers after each of its steps; None: as its model's
            configuration says.
        wants_tokens: an engine's responses have the new tokens of each row in place of tensors, and
            the last one all.
        parameters: those that only models of others read.
        fits: whether its names, types and shapes are known to be those of the model.
    """

    tensors: dict[str, Array]
    wanted: Collection[str] = ()
    turn: SessionTurn | None = None
    id: str = ""
    is_canary: bool = False
    streams: bool | None = None
    wants_tokens: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fits: bool = False


class ModelHost(Protocol):
    """The server around a model."""

    def show(self, metrics: ModelMetrics) -> None:
        """Show a model's metrics among the server's."""

    def warn(self, message: str) -> None:
        """Write to the server's log."""

    def leave(self, reason: str) -> None:
        """Take a model whose engine has failed out of service, after its answers."""
