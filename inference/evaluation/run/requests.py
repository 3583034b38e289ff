"""Requests to the server one by one: what is needed of a client, and the served tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from inference.evaluation.task import RequestFailedError

Tensors = Mapping[str, "np.ndarray[Any, Any]"]
Arrays = dict[str, "np.ndarray[Any, Any]"]
_REMEMBERED = 4096
# Triton's names of the types that requests hold, in numpy's.
NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}


class InferenceClient(Protocol):
    """The part of the Triton client that is needed here; safe to use from several threads."""

    def infer(self, model: str, inputs: Tensors, *, outputs: Sequence[str] | None = None) -> Arrays:
        """Send one request and return its outputs by name."""
        ...

    def stream(
        self, model: str, inputs: Tensors, *, outputs: Sequence[str] | None = None
    ) -> Iterator[Arrays]:
        """Yield the responses of one request to a model that streams, outputs by name."""
        ...

    def streams(self, model: str) -> bool:
        """Return whether `model` answers in several responses."""
        ...

    def input_types(self, model: str) -> Mapping[str, str]:
        """Return the inputs that `model` declares and their Triton types."""
        ...


def ask(
    client: InferenceClient,
    model: str,
    inputs: Tensors,
    *names: str,
    each_frame: Callable[[], None] | None = None,
) -> Arrays:
    """Send one request and return the outputs called `names`; of a stream, the last of them.

    `each_frame` is called for every response of a model that streams, as it comes.

    Raises:
        RequestFailedError: the server refused, failed or did not answer in time.
    """
    from tritonclient.utils import InferenceServerException

    try:
        if each_frame is None or not client.streams(model):
            return client.infer(model, inputs, outputs=names)
        last: Arrays = {}
        for frame in client.stream(model, inputs, outputs=names):
            each_frame()
            last = frame
        return last
    except (InferenceServerException, OSError) as error:
        raise RequestFailedError(f"{model}: {error}") from error


def first_text(tensor: np.ndarray[Any, Any]) -> str:
    """Return the first text of a tensor of bytes."""
    return bytes(tensor.reshape(-1)[0]).decode("utf-8", "replace")


def text_tensor(text: str) -> np.ndarray[Any, Any]:
    """Return one row of text, (1, 1)."""
    return np.array([[text.encode("utf-8")]], dtype=object)


class ServedTokenizer:
    """The server's own preprocessing and postprocessing; what was asked lately is remembered."""

    def __init__(
        self,
        client: InferenceClient,
        *,
        preprocessing: str = "preprocessing",
        postprocessing: str = "postprocessing",
    ) -> None:
        self._client = client
        self._preprocessing = preprocessing
        self._postprocessing = postprocessing
        self._encoded = lru_cache(maxsize=_REMEMBERED)(self._encode)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`."""
        return self._encoded(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        inputs = {
            "QUERY": text_tensor(text),
            "BAD_WORDS_DICT": text_tensor(""),
            "STOP_WORDS_DICT": text_tensor(""),
            "REQUEST_OUTPUT_LEN": np.array([[1]], np.uint32),
        }
        outputs = ask(self._client, self._preprocessing, inputs, "INPUT_ID", "REQUEST_INPUT_LEN")
        count = int(outputs["REQUEST_INPUT_LEN"].reshape(-1)[0])
        return tuple(int(each) for each in outputs["INPUT_ID"][0, :count])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; end tokens at the end give no text."""
        declared = self._client.input_types(self._postprocessing)["TOKENS_BATCH"]
        inputs = {"TOKENS_BATCH": np.array([[ids]], NUMPY_TYPES[declared])}
        return first_text(ask(self._client, self._postprocessing, inputs, "OUTPUT")["OUTPUT"])
