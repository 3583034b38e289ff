"""Requests to a model, and the interface of the server that hosts it."""

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
Responses = AsyncGenerator[tuple[Outputs, bool], None]  # outputs, and whether they are the last
# The future of a request in an engine, and a function from its steps and its result to outputs,
# None if a step has none.
Submitted = tuple[Future[Any], Callable[[Any], Outputs | None]]
TOKENS = "tokens"  # the only output of a request with `wants_tokens`


def readable(error: BaseException) -> str:
    """Return an error's text, or else its kind, in valid UTF-8, which file names may not be."""
    text = str(error) or type(error).__name__
    return text.encode(errors="surrogateescape").decode(errors="replace")


class ModelError(Exception):
    """The error with which a model answers a request. `code` is the name of gRPC's status."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class InferRequest:
    """One request to a model, independent of the protocol.

    Attributes:
        tensors: inputs by name; BF16, which numpy lacks, is held as FP32.
        wanted: names of outputs; empty for all.
        turn: the session turn, None without a session.
        id: the client's id of the request.
        is_canary: sent by the server itself to check that the model answers.
        streams: whether to respond after each step; None for the model's configuration.
        wants_tokens: respond with the new tokens of each row instead of tensors; the last response
            has all tokens.
        parameters: request parameters for third-party models.
        matches: whether names, types and shapes are known to match the model's signature.
        is_answered: whether the client needs no further response; a request that is closed then
            counts as completed.
    """

    tensors: dict[str, Array]
    wanted: Collection[str] = ()
    turn: SessionTurn | None = None
    id: str = ""
    is_canary: bool = False
    streams: bool | None = None
    wants_tokens: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)
    matches: bool = False
    is_answered: bool = False


class ModelHost(Protocol):
    """The server that hosts a model."""

    def show(self, metrics: ModelMetrics) -> None:
        """Publish a model's metrics in the server's `/metrics`."""

    def warn(self, message: str) -> None:
        """Write a warning to the server's log."""

    def go_out_of_service(self, reason: str) -> None:
        """Take a model whose engine has failed out of service, after its last answers."""
