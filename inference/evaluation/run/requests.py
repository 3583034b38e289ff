"""Requests to the server one by one, and the served tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from tritonclient.utils import InferenceServerException

from inference.evaluation.task import RequestFailedError
from inference.server.client import Outputs, Tensors, TritonClient
from inference.server.tensors import as_tensor, as_texts

_REMEMBERED = 4096


def ask(
    client: TritonClient,
    model: str,
    inputs: Tensors,
    *names: str,
    each_frame: Callable[[], None] | None = None,
) -> Outputs:
    """Send one request and return the outputs called `names`; of a stream, the last of them.

    `each_frame` is called for every response of a model that streams, as it comes.

    Raises:
        RequestFailedError: the server refused, failed or did not answer in time.
    """
    try:
        if each_frame is None or not client.streams(model):
            return client.infer(model, inputs, outputs=names)
        last: Outputs = {}
        for frame in client.stream(model, inputs, outputs=names):
            each_frame()
            last = frame
        return last
    except (InferenceServerException, OSError) as error:
        raise RequestFailedError(f"{model}: {error}") from error


class ServedTokenizer:
    """The server's own preprocessing and postprocessing; what was asked lately is remembered."""

    def __init__(
        self,
        client: TritonClient,
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
            "QUERY": as_tensor([text], "BYTES"),
            "BAD_WORDS_DICT": as_tensor([""], "BYTES"),
            "STOP_WORDS_DICT": as_tensor([""], "BYTES"),
            "REQUEST_OUTPUT_LEN": as_tensor([1], "UINT32"),
        }
        outputs = ask(self._client, self._preprocessing, inputs, "INPUT_ID", "REQUEST_INPUT_LEN")
        count = int(outputs["REQUEST_INPUT_LEN"].reshape(-1)[0])
        return tuple(int(each) for each in outputs["INPUT_ID"][0, :count])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; end tokens at the end give no text."""
        declared = self._client.input_types(self._postprocessing)["TOKENS_BATCH"]
        inputs = {"TOKENS_BATCH": as_tensor([[ids]], declared)}
        outputs = ask(self._client, self._postprocessing, inputs, "OUTPUT")
        return as_texts(outputs["OUTPUT"])[0][0]
