"""The owner's connection to a tritonserver: readiness, models, statistics, and small requests.

gRPC over the server's Unix socket, or over TCP to a server of another project. Every release that
serves FasterTransformer models has these calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonclient.utils import InferenceServerException

from inference.decoding.rows import SessionTurn
from inference.front.sockets import CHANNEL_OPTIONS
from inference.server.client import Tensors, TritonClient
from inference.server.probe import is_interactive, probe_tensors

_TIMEOUT_S = 1.0
# Channels of one process to the same address would share a connection.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
_WHOLE_SESSION = SessionTurn(2**31, starts=True, ends=True)


class NoAnswerError(OSError):
    """The server did not answer in time, or cannot be reached."""


class RefusalError(ValueError):
    """The server answered with an error; `code` is gRPC's, such as INTERNAL."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words or code)
        self.code = code


class Admin(TritonClient):
    """A connection to one server; safe to use from several threads.

    Its own methods raise NoAnswerError where the server does not answer, and RefusalError where it
    answers with an error.
    """

    def __init__(self, target: str, *, hidden: int | None = None) -> None:
        """Connect at the first call; `target` is `unix:PATH` or `host:port`.

        `hidden` is the width of the hidden states that an encoder takes, if it is known.
        """
        super().__init__(target, timeout_s=_TIMEOUT_S, channel_options=_OPTIONS)
        self._hidden = hidden
        self._messages: dict[str, Any] = {}

    def is_model_ready(self, name: str) -> bool:
        """Return whether the server says that a model serves."""
        return bool(self._asked("is_model_ready", name))

    def statuses(self) -> Sequence[Any]:
        """Return each model of the repository, with name, state and reason, as Triton has them.

        The state is READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded.
        """
        return list(self._asked("get_model_repository_index").models)

    def config(self, name: str) -> Any:
        """Return a model's configuration, the protobuf message of Triton, which is cached."""
        if name not in self._messages:
            self._messages[name] = self._asked("get_model_config", name).config
        return self._messages[name]

    def executed(self, name: str) -> int:
        """Return how often a model has run and how many requests it has answered, added up."""
        found = self._asked("get_inference_statistics", name).model_stats
        return sum(each.execution_count + each.inference_stats.success.count for each in found)

    def small_request(self, name: str) -> Tensors | None:
        """Return a small valid request to a model; None for an encoder of unknown width."""
        return probe_tensors(self.config(name), hidden=self._hidden)

    def ask(
        self, name: str, *, timeout_s: float, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Send a model a small request, if there is one, and wait for its whole answer."""
        if (tensors := self.small_request(name)) is None:
            return
        turn = _WHOLE_SESSION if is_interactive(self.config(name)) else None
        try:
            self.infer(name, tensors, turn=turn, parameters=parameters, timeout_s=timeout_s)
        except InferenceServerException as error:
            raise _explained(error) from error

    def _asked(self, method: str, *args: Any) -> Any:
        try:
            return self._call(method, *args)
        except InferenceServerException as error:
            raise _explained(error) from error


def _explained(error: Any) -> NoAnswerError | RefusalError:
    words = str(error.message())
    # An error within a stream has no code; the text begins with one, see `Exchange.fail`.
    code = str(error.status() or words.partition(": ")[0]).removeprefix("StatusCode.")
    # Where gRPC itself, and not the server, says that it is unavailable.
    is_unreachable = code == "UNAVAILABLE" and ("connect" in words or "Socket closed" in words)
    if is_unreachable or code in ("DEADLINE_EXCEEDED", "CANCELLED"):
        return NoAnswerError(words)
    return RefusalError(code, words)
