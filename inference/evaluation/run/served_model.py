"""A TextGenerator on top of Triton's protocols: ids go to the model, text to the ensemble.

Requests follow the serving contract (names, types and shapes).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path

import numpy as np
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from export_scripts.ft.generation_file import all_end_tokens
from export_scripts.ft.tokenizer_files import find_tokenizer
from foundations.files.json_content import Table
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.evaluation.openai_client import is_lost, is_retryable
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.rows import GREEDY, GREEDY_WITH_LOG_PROBS, answers, generation_request
from inference.evaluation.task import (
    Completion,
    EvaluationError,
    Ids,
    RequestFailedError,
    RequestTensors,
    RetryableError,
    Tally,
    TextGenerator,
    TokenIds,
)
from inference.evaluation.tasks.served_folder import read_served
from inference.server.client import Outputs, Tensors, TritonClient
from inference.server.tensors import as_tensor, as_texts

_CACHED_TEXTS = 4096  # encoded texts
# Errors of gRPC that mean a full queue, a server that stops, or no server; those of streams have no
# field for the code.
_UNAVAILABLE = ("[StatusCode.UNAVAILABLE]", "UNAVAILABLE: ")
_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_SCORING = GREEDY_WITH_LOG_PROBS | {"is_return_context_cum_log_probs": np.array([[True]])}


def ask(
    client: TritonClient,
    model: str,
    inputs: Tensors,
    *names: str,
    each_frame: Callable[[], None] | None = None,
) -> Outputs:
    """Send one request and return the outputs `names`; for a stream, those of the last response.

    `each_frame` is called when a response of a streaming model arrives.

    Raises:
        RequestFailedError: the server refused, failed or did not answer in time.
    """
    found = {}
    try:
        if each_frame is None or not client.streams(model):
            found = client.infer(model, inputs, outputs=names)
        else:
            for frame in client.stream(model, inputs, outputs=names):
                each_frame()
                found = frame
    except (InferenceServerException, OSError) as error:
        status = str(error.status()) if isinstance(error, InferenceServerException) else ""
        is_busy = status.isdecimal() and is_retryable(int(status))
        if is_busy or str(error).startswith(_UNAVAILABLE) or is_lost(error):
            raise RetryableError(f"{model}: {error}", is_lost=is_lost(error)) from error
        raise RequestFailedError(f"{model}: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise RequestFailedError(f"{model}: the answer lacks {', '.join(missing)}")
    return found


class ServedTokenizer:
    """The server's preprocessing and postprocessing models, with a cache of encoded texts."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self.encode = lru_cache(maxsize=_CACHED_TEXTS)(self._encode)

    def _encode(self, text: str) -> TokenIds:
        inputs = {
            "QUERY": as_tensor([text], "BYTES"),
            "BAD_WORDS_DICT": as_tensor([""], "BYTES"),
            "STOP_WORDS_DICT": as_tensor([""], "BYTES"),
            "REQUEST_OUTPUT_LEN": as_tensor([1], "UINT32"),
        }
        outputs = ask(self._client, "preprocessing", inputs, "INPUT_ID", "REQUEST_INPUT_LEN")
        count = int(outputs["REQUEST_INPUT_LEN"].reshape(-1)[0])
        return tuple(outputs["INPUT_ID"][0, :count].tolist())

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids, without end tokens at the end."""
        declared = self._client.input_types("postprocessing")["TOKENS_BATCH"]
        inputs = {"TOKENS_BATCH": as_tensor([[ids]], declared)}
        outputs = ask(self._client, "postprocessing", inputs, "OUTPUT")
        return as_texts(outputs["OUTPUT"])[0][0]


@dataclass(frozen=True)
class ServedModel(TextGenerator):
    """A model of a Triton server.

    `end_ids` are the tokens that end answers.
    """

    client: TritonClient
    tokenizer: Tokenizer | ServedTokenizer
    model_name: str = "fastertransformer"
    ensemble_name: str | None = "ensemble"
    end_ids: TokenIds = ()
    tally: Tally = field(default_factory=Tally)

    @cached_property
    def _types(self) -> Mapping[str, str]:
        return self.client.input_types(self.model_name)

    @property
    def is_encoder_decoder(self) -> bool:
        """Return whether the model's inputs are those of T5."""
        return "max_output_len" in self._types

    @property
    def streams(self) -> bool:
        """Return whether answers to token ids arrive token by token."""
        return self.client.streams(self.model_name)

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`."""
        return tuple(self.tokenizer.encode(text))

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids)

    def decode_answer(self, ids: Ids) -> str:
        """Return the text of generated tokens, up to the end token."""
        return self.decode([*takewhile(lambda token: token not in self.end_ids, ids)])

    def complete_text(self, prompt: str, *, output_len: int) -> Completion:
        """Return the greedy continuation as text, through the ensemble if there is one."""
        if self.ensemble_name is None and self.is_encoder_decoder:
            raise RequestFailedError(
                f"{self.model_name} is an encoder-decoder model: only the ensemble ends prompts as "
                "in training; export it with export.triton_deployment.ensemble=true."
            )
        if self.ensemble_name is None:
            return super().complete_text(prompt, output_len=output_len)
        inputs = {
            "INPUT_0": as_tensor([prompt], "BYTES"),
            "INPUT_1": as_tensor([output_len], "UINT32"),
            "INPUT_2": as_tensor([""], "BYTES"),  # banned words
            "INPUT_3": as_tensor([""], "BYTES"),  # stop words
            **GREEDY,
        }
        outputs = ask(self.client, self.ensemble_name, inputs, "OUTPUT_0", "sequence_length")
        length = int(outputs["sequence_length"].reshape(-1)[0])
        prompt_len = 0 if self.is_encoder_decoder else len(self.encode(prompt))
        self._count(length - prompt_len, output_len)
        return Completion(
            text=self._answer(as_texts(outputs["OUTPUT_0"])[0][0], prompt),
            generated=length - prompt_len,
        )

    def _answer(self, text: str, prompt: str) -> str:
        """Return `text` without the prompt, which ensembles repeat by default.

        A tokenizer that does not preserve text repeats the prompt as decoded. An encoder-decoder
        model does not repeat it.
        """
        if self.is_encoder_decoder:
            return text
        if text.startswith(prompt):
            return text[len(prompt) :]
        return text.removeprefix(self.decode(self.encode(prompt)))

    def complete_ids(
        self, input_ids: Ids, *, output_len: int, tensors: RequestTensors | None = None
    ) -> TokenIds:
        """Return the greedy tokens after `input_ids`, up to the end token."""
        return self.complete_rows([input_ids], output_len=output_len, tensors=tensors)[0]

    def complete_rows(
        self,
        rows: Sequence[Ids],
        *,
        output_len: int,
        tensors: RequestTensors | None = None,
        each_frame: Callable[[], None] | None = None,
    ) -> list[TokenIds]:
        """Return the greedy tokens after each row, up to the end token, from one request.

        `each_frame` is called when a response of a streaming model arrives.
        """
        has_encoder = self.is_encoder_decoder
        extra = self._typed(tensors or {})
        inputs = generation_request(rows, output_len, has_encoder=has_encoder)
        inputs |= {
            name: np.repeat(array.reshape(1, *(array.shape or (1,))), len(rows), axis=0)
            for name, array in extra.items()
        }
        names = ["output_ids", "sequence_length"]
        if not has_encoder and {"request_prompt_embedding", "prompt_learning_task_name_ids"} & {
            *extra
        }:
            names.append("response_input_lengths")
        outputs = ask(self.client, self.model_name, inputs, *names, each_frame=each_frame)
        found = answers(rows, outputs, has_encoder=has_encoder)
        for answer in found:
            self._count(len(answer), output_len)
        return found

    def _count(self, length: int, output_len: int) -> None:
        """Count an answer; one below the requested length was ended by the model."""
        self.tally.count("stop" if length < output_len else "length")

    def _typed(self, tensors: RequestTensors) -> Outputs:
        """Convert values and arrays to the types that the model declares.

        Raises:
            RequestFailedError: the model lacks an input.
        """
        if unknown := [name for name in tensors if name not in self._types]:
            raise RequestFailedError(f"{self.model_name} has no input {', '.join(unknown)}.")
        return {
            name: np.asarray(value, triton_to_np_dtype(self._types[name]))
            for name, value in tensors.items()
        }

    def context_log_prob(self, input_ids: Ids) -> float:
        """Return the natural log probability of `input_ids` after their first token."""
        inputs = generation_request([input_ids], 1, _SCORING, has_encoder=self.is_encoder_decoder)
        outputs = ask(self.client, self.model_name, inputs, *_LOG_PROBS)
        # The sum includes the generated tokens.
        return float(outputs["cum_log_probs"].reshape(-1)[0]) - math.fsum(
            outputs["output_log_probs"].ravel().tolist()
        )

    def input_names(self) -> Collection[str]:
        """Return the inputs that the model declares."""
        return self._types.keys()

    def infer(self, tensors: RequestTensors, outputs: Sequence[str]) -> Table:
        """Return outputs of the model for a request of contract tensors, batch axis first."""
        return ask(self.client, self.model_name, self._typed(tensors), *outputs)


@contextmanager
def connect(options: EvaluationOptions) -> Iterator[TextGenerator]:
    """Connect to the Triton model at `options.url`, and yield it.

    Raises:
        EvaluationError: no server answers there, or the model is not ready.
    """
    with TritonClient(
        options.url,
        protocol=options.protocol,
        timeout_s=options.request_timeout_s,
        credentials=options.credentials,
    ) as client:
        _check_ready(client, options)
        tokenizer: Tokenizer | ServedTokenizer = ServedTokenizer(client)
        # An encoder may have no tokenizer, and needs none without tasks.
        if (folder := options.tokenizer_dir) is not None and (
            options.tasks or find_tokenizer(folder) is not None
        ):
            tokenizer = load_tokenizer(folder)
        config = read_served(options.weights_dir)
        yield ServedModel(
            client,
            tokenizer,
            model_name=options.model_name,
            ensemble_name=options.ensemble_name,
            end_ids=_end_ids(options.weights_dir, getattr(config, "end_id", None)),
        )


def served_checkpoint(options: EvaluationOptions, url: str) -> str:
    """Return the hash of the weights that a server serves; empty if it does not state one.

    Args:
        options: the model's name, and the credentials.
        url: the server's HTTP address.

    Raises:
        EvaluationError: the server does not answer.
    """
    try:
        with TritonClient(
            url,
            protocol="http",
            timeout_s=options.request_timeout_s,
            credentials=options.credentials,
        ) as client:
            return client.parameters(options.model_name).get("slipway_checkpoint", "")
    except (InferenceServerException, OSError) as error:
        raise EvaluationError(
            f"the server at {url} does not describe {options.model_name}: {error}"
        ) from error


def _end_ids(folder: Path | None, end_id: int | None) -> TokenIds:
    if end_id is None:
        return ()
    return (end_id,) if folder is None else all_end_tokens(folder, end_id)


def _check_ready(client: TritonClient, options: EvaluationOptions) -> None:
    """Raise EvaluationError if the model or the ensemble is not ready."""
    if not client.is_ready():
        raise EvaluationError(
            f"no ready server answers {options.protocol} requests at {options.url}; start one "
            "with the stage deploy, or set evaluate.server to the address of a running one."
        )
    needed = {options.model_name, options.ensemble_name or options.model_name}
    if missing := [name for name in sorted(needed) if not client.is_ready(name)]:
        served = [
            f"{model['name']} ({model['state'].lower() or 'not loaded'})"
            for model in client.models()
        ]
        raise EvaluationError(
            f"the server at {options.url} has no ready model {' and '.join(missing)}; it serves "
            f"{', '.join(served) or 'no model'}. Its log says why a model is not ready."
        )
