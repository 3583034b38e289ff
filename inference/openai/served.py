"""Models that Triton serves, reached over gRPC."""

# Shapes: n candidates, S prompt, L prompt and answer, W best tokens of a place

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from export_scripts.ft.config_ini import read_config
from inference.gateway.cancellation import Cancellations
from inference.gateway.rules import without_internal_names
from inference.openai.errors import ApiError
from inference.openai.generation import Array, Candidate, GenerationJob, ModelFacts

PREPROCESSING = "preprocessing"
_READY_TIMEOUT_S = 2.0
_POLL_S = 0.2
_DEFAULT_CONTEXT = 4096  # of the engine, where neither model nor parameters say
# How Triton's refusals of a request are spelled in gRPC.
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
}
_REQUIRED = {"request_output_len": "input_lengths", "max_output_len": "sequence_length"}
_SCORES = ("token_log_probs", "top_token_ids", "top_token_log_probs")
# What begins an error on a stream, which carries no status; without it the request is wrong.
_STREAM_STATUS = ("UNAVAILABLE", "CANCELLED", "INTERNAL")


class TritonModel:
    """One model of a Triton server, as a `Generator`."""

    def __init__(self, client: InferenceServerClient, facts: ModelFacts) -> None:
        self.facts = facts
        self._client = client
        self._cancellations = Cancellations()

    async def generate(self, job: GenerationJob) -> AsyncIterator[Sequence[Candidate]]:
        """Yield the candidates as they grow, see `Generator`."""
        inputs = [_input(name, value) for name, value in self._tensors(job).items()]
        names = ["output_ids", "sequence_length"]
        names += _SCORES if job.scores else ()
        names += ["cum_log_probs"] if job.ranks else []
        outputs = [InferRequestedOutput(name) for name in names]
        request = {"model_name": self.facts.name, "inputs": inputs, "outputs": outputs}
        try:
            if not self.facts.streams:
                yield self._candidates(job, await self._client.infer(**request))
                return
            responses = self._client.stream_infer(_only(request))
            try:
                async for result, error in responses:
                    if error is not None:
                        raise error
                    yield self._candidates(job, result)
            except (GeneratorExit, asyncio.CancelledError):
                self._cancellations.add(responses)  # the client has left, or has what it wanted
                raise
        except (InferenceServerException, grpc.RpcError) as error:
            raise api_error(error) from error

    def _tensors(self, job: GenerationJob) -> dict[str, Array]:
        output_name = "max_output_len" if self.facts.encoder_decoder else "request_output_len"
        rows = job.candidates
        return {
            "input_ids": np.tile(np.array(job.prompt, np.uint32), (rows, 1)),  # (n, S)
            _REQUIRED[output_name]: np.full((rows, 1), len(job.prompt), np.uint32),
            output_name: np.full((rows, 1), job.output_len, np.uint32),
            **job.tensors,
        }

    def _candidates(self, job: GenerationJob, result: InferResult) -> list[Candidate]:
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        first = 0 if self.facts.encoder_decoder else len(job.prompt)
        arrays = [result.as_numpy(name) for name in _SCORES] if job.scores else []
        found = []
        for row in range(job.candidates):
            tokens = ids[row, 0, first : int(lengths[row, 0])]
            own, top_ids, top = (each[row, 0] for each in arrays) if arrays else (None,) * 3
            total = float(result.as_numpy("cum_log_probs")[row, 0]) if job.ranks else 0.0
            found.append(Candidate(tuple(tokens.tolist()), own, top_ids, top, total))
        return found


async def ready_client(address: str) -> InferenceServerClient:
    """Return a client of a server that is ready, once it is."""
    client = InferenceServerClient(address)
    while True:
        try:
            if await client.is_server_ready():
                return client
        except InferenceServerException:
            pass  # not listening yet
        await asyncio.sleep(_POLL_S)


async def is_ready(client: InferenceServerClient, unready: Path | None) -> bool:
    """Return whether a server would answer a request now.

    Args:
        client: Client of the server.
        unready: File that exists while one of its models does not answer canaries, None where the
            server's own answer includes that.
    """
    if unready is not None and unready.exists():
        return False
    try:
        return bool(await client.is_server_ready(client_timeout=_READY_TIMEOUT_S))
    except InferenceServerException:
        return False


async def served_models(
    client: InferenceServerClient, repository: Path | None
) -> list[TritonModel]:
    """Return the models that complete token ids without sessions, by name.

    Args:
        client: Client of a server that is ready.
        repository: Folder of its models; None if they are not in a folder.
    """
    index = await client.get_model_repository_index()
    found = []
    for name in sorted({model.name for model in index.models}):
        config = (await client.get_model_config(name)).config
        inputs = frozenset(tensor.name for tensor in config.input)
        lengths = {"request_output_len", "max_output_len"} & inputs
        if "input_ids" not in inputs or not lengths or config.HasField("sequence_batching"):
            continue
        facts = ModelFacts(
            name=name,
            inputs=inputs,
            max_rows=max(config.max_batch_size, 1),
            context_len=_context_len(config, repository),
            encoder_decoder="max_output_len" in inputs,
            streams=config.model_transaction_policy.decoupled,
        )
        found.append(TritonModel(client, facts))
    return found


async def text_parameters(client: InferenceServerClient) -> Mapping[str, str]:
    """Return the parameters of the model that encodes texts, none if there is no such model."""
    try:
        config = (await client.get_model_config(PREPROCESSING)).config
    except InferenceServerException:
        return {}
    return {key: value.string_value for key, value in config.parameters.items()}


def _context_len(config: Any, repository: Path | None) -> int:
    """Return the most tokens of a sequence, from the model's parameters and its config.ini."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    limit = int(parameters.get("max_seq_len", _DEFAULT_CONTEXT))
    folder = parameters.get("model_checkpoint_path")
    if folder is None and repository is not None:
        folder = str(repository / config.name / "1" / f"{parameters['tensor_para_size']}-gpu")
    if folder is None or not (Path(folder) / "config.ini").is_file():
        return limit
    family, model = read_config(Path(folder))
    positions = getattr(family.architecture(model), "max_pos_seq_len", None)
    if getattr(model, "is_absolute", False):  # a T5's table
        positions = getattr(model, "positions", None)
    return min(limit, positions) if positions else limit


async def _only(request: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    yield dict(request)


def _input(name: str, value: Array) -> InferInput:
    tensor = InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    tensor.set_data_from_numpy(value)
    return tensor


def api_error(error: Exception) -> ApiError:
    """Return the error for a client where the server answers with one."""
    if isinstance(error, InferenceServerException):
        status, text = str(error.status() or ""), str(error.message() or "")
    else:
        status, text = str(error.code()), str(error.details())  # type: ignore[attr-defined]
    if not status:
        status, _, rest = text.partition(": ")
        status, text = (status, rest) if status in _STREAM_STATUS else ("INVALID_ARGUMENT", text)
    text = without_internal_names(text)
    code = _STATUS.get(status.rpartition(".")[2], HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(text or "the model does not answer", status=code)
