"""The owner's connection to a tritonserver: readiness, models, statistics, and small requests.

gRPC over the server's Unix socket, or over TCP to a server of another project. Every release that
serves FasterTransformer models has these calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from inference.decoding.rows import SessionTurn
from inference.front.sockets import CHANNEL_OPTIONS
from inference.server.client import Tensors, TritonClient

_TIMEOUT_S = 1.0
# Channels of one process to the same address would share a connection.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
_WHOLE_SESSION = SessionTurn(2**31, starts=True, ends=True)
# A small request has two tokens in and two out: its prompt pass and a decoding step warm the model.
_TOKENS = 2
_SESSION_LEN = "session_len"
_TEXTS = {
    **dict.fromkeys(("INPUT_0", "QUERY", "query", "prompts"), b"Hello"),
    "tasks": b"text_generation",
}
_IDS = "input_ids"
_MAX_LENGTH = "max_length"  # 30 tokens without it
_COUNTS = (
    *("input_lengths", "sequence_length", "sequence_lengths"),
    *("request_output_len", "max_output_len", "INPUT_1", "REQUEST_OUTPUT_LEN"),
    _MAX_LENGTH,
)
_NUMBERS = {
    **dict.fromkeys(_COUNTS, _TOKENS),
    _IDS: 0,  # a token of every vocabulary
    _SESSION_LEN: 64,  # optional in config.pbtxt, and needed all the same
}
_HIDDEN_TYPES = ("FP32", "FP16", "BF16")


class RefusalError(ValueError):
    """The server answered with an error; `code` is gRPC's, such as INTERNAL."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words or code)
        self.code = code


class Admin(TritonClient):
    """A connection to one server; safe to use from several threads.

    Its own methods raise ConnectionError where the server does not answer in time or cannot be
    reached, and RefusalError where it answers with an error.
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
        return bool(self._asked(self._call, "is_model_ready", name))

    def statuses(self) -> Sequence[Any]:
        """Return each model of the repository, with name, state and reason, as Triton has them.

        The state is READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded.
        """
        return list(self._asked(self._call, "get_model_repository_index").models)

    def config(self, name: str) -> Any:
        """Return a model's configuration, the protobuf message of Triton, which is cached."""
        if name not in self._messages:
            self._messages[name] = self._asked(self._call, "get_model_config", name).config
        return self._messages[name]

    def executed(self, name: str) -> int:
        """Return how often a model has run and how many requests it has answered, added up."""
        found = self._asked(self._call, "get_inference_statistics", name).model_stats
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
        options = {"turn": turn, "parameters": parameters, "timeout_s": timeout_s}
        self._asked(self.infer, name, tensors, **options)

    def _asked(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except InferenceServerException as error:
            words = str(error.message())
            # An error within a stream has no code; the text begins with one, see `Exchange.fail`.
            code = str(error.status() or words.partition(": ")[0]).removeprefix("StatusCode.")
            # Where gRPC itself, and not the server, says that it is unavailable.
            is_away = code == "UNAVAILABLE" and ("connect" in words or "Socket closed" in words)
            if is_away or code in ("DEADLINE_EXCEEDED", "CANCELLED"):
                raise ConnectionError(words) from error
            raise RefusalError(code, words) from error


def probe_tensors(config: Any, *, hidden: int | None) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return the inputs of a small valid request to a model, whose configuration is a message.

    `hidden` is the width of the hidden states that an encoder may take; without it the result for
    such a model is None.
    """
    needed = (_MAX_LENGTH, _SESSION_LEN) if is_interactive(config) else (_MAX_LENGTH,)
    found = {}
    for each in config.input:
        if each.optional and each.name not in needed:
            continue
        kind = model_config_pb2.DataType.Name(each.data_type).removeprefix("TYPE_")
        dims = [max(size, 1) for size in each.dims]
        value: int | bytes = _NUMBERS.get(each.name, 0 if kind == "BOOL" else 1)
        if kind in _HIDDEN_TYPES and len(dims) > 1:
            if hidden is None:
                return None
            dims[-2:] = [_TOKENS, hidden]
        elif kind == "STRING":
            value = _TEXTS.get(each.name, b"")
        elif each.name == _IDS:
            dims[-1] = _TOKENS
        dtype = object if kind == "STRING" else triton_to_np_dtype(kind)
        found[each.name] = np.full([1] * bool(config.max_batch_size) + dims, value, dtype)
    return found


def is_interactive(config: Any) -> bool:
    """Return whether a model's requests belong to sessions, or an ensemble hands them to one."""
    return bool(
        config.HasField("sequence_batching")
        or any(tensor.name == _SESSION_LEN for tensor in config.input)
    )
