"""Models that Triton serves, reached over gRPC."""

# Shapes: n candidates, S prompt, L prompt and answer, W best tokens of a place; B rows, E hidden

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as schema
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from export_scripts.ft.config_ini import read_config
from export_scripts.ft.identity import served_identity
from inference.backend.text_models import pad_rows
from inference.front.guard import RejectedError
from inference.front.openai.answers import Array, Candidate
from inference.front.openai.prepare import ModelFacts
from inference.front.rules import INFER_CALL, SERVICE, STREAM_CALL, without_internal_names
from inference.front.upstream import Upstream

_TEXT_MODELS = ("preprocessing", "tokenizer")  # of models that generate, and of encoders
HIDDEN = "output_hidden_state"
_READY_TIMEOUT_S, _POLL_S = 2.0, 0.2
_OPENING_S = 30.0  # a machine that has just loaded models may be slow
_DEFAULT_CONTEXT = 4096  # of the engine, where neither model nor parameters say
# Refusals of a request by the server; of others the cause is the server itself.
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
}
# What begins an error on a stream, which carries no status; without it the request is wrong.
_ON_STREAMS = ("UNAVAILABLE", "CANCELLED", "INTERNAL")
_SCORES = ("token_log_probs", "top_token_ids", "top_token_log_probs")


class TritonModel:
    """One model of a Triton server."""

    def __init__(self, upstream: Upstream, facts: ModelFacts) -> None:
        self.facts = facts
        self._infer = upstream.channel.unary_unary(INFER_CALL)
        self._stream = upstream.channel.stream_stream(STREAM_CALL)
        self._cancellations = upstream.cancellations

    async def generate(
        self, job: Mapping[str, Array], *, streams: bool
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        """Yield the candidates, whole, and before as they grow. Closing it cancels the job.

        `job` holds the inputs. Without `streams` candidates that still grow need not come. Raises
        RejectedError if the model refuses the request, or cannot answer.
        """
        del streams  # a model that streams always does
        request = infer_request(self.facts.name, job, wanted_outputs(job)).SerializeToString()
        prompt_len = 0 if self.facts.encoder_decoder else job["input_ids"].shape[1]
        call = self._stream([request]) if self.facts.streams else self._infer(request)
        try:
            if not self.facts.streams:
                answer = schema.ModelInferResponse.FromString(await call)
                yield candidates_of(output_arrays(answer), prompt_len)
                return
            async for reply in call:
                frame = schema.ModelStreamInferResponse.FromString(reply)
                if frame.error_message:
                    raise stream_error(frame.error_message)
                yield candidates_of(output_arrays(frame.infer_response), prompt_len)
        except grpc.aio.AioRpcError as error:
            raise api_error(error) from None
        except asyncio.CancelledError:  # of this task, or of the call: the server is leaving
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise _error("", "UNAVAILABLE") from None
        finally:
            if not call.done():  # the client has left, or has what it wanted
                self._cancellations.add(call)

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return each row's mean hidden state, scaled to length 1, (B, E). Raises RejectedError."""
        found = []
        for first in range(0, len(rows), self.facts.max_rows):
            ids, lengths = pad_rows(rows[first : first + self.facts.max_rows], pad_id=0)
            tensors = {"input_ids": ids, "sequence_length": lengths}
            request = infer_request(self.facts.name, tensors, [HIDDEN]).SerializeToString()
            try:
                reply = await self._infer(request)
            except grpc.aio.AioRpcError as error:
                raise api_error(error) from error
            found.append(await asyncio.to_thread(_means, reply, lengths))
        return unit_vectors(np.concatenate(found))


def unit_vectors(rows: Array) -> Array:
    """Return rows, (B, E), scaled to length 1."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(norms, np.finfo(np.float32).tiny))


def wanted_outputs(job: Mapping[str, Array]) -> list[str]:
    """Return the names of the outputs that a job needs."""
    wanted = ["output_ids", "sequence_length"]
    wanted += _SCORES if "num_log_probs" in job else ()
    return wanted + (["cum_log_probs"] if "is_return_log_probs" in job else [])


def candidates_of(outputs: Mapping[str, Array], prompt_len: int) -> list[Candidate]:
    """Return the candidates in a model's outputs, which return so many tokens of the prompt."""
    ids, lengths = outputs["output_ids"], outputs["sequence_length"]  # (n, 1, L), (n, 1)
    found = []
    for row in range(len(ids)):
        own, top_ids, top = (outputs[n][row, 0] if n in outputs else None for n in _SCORES)
        total = float(outputs["cum_log_probs"][row, 0]) if "cum_log_probs" in outputs else 0.0
        tokens = ids[row, 0, prompt_len : int(lengths[row, 0])].tolist()
        found.append(Candidate(tokens, own, top_ids, top, total))
    return found


def infer_request(model: str, tensors: Mapping[str, Array], wanted: Sequence[str]) -> Any:
    """Return a ModelInferRequest with some tensors, which asks for some outputs."""
    request = schema.ModelInferRequest(model_name=model)
    for name, value in tensors.items():
        datatype = np_to_triton_dtype(value.dtype)
        request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        is_text = datatype == "BYTES"
        raw = serialize_byte_tensor(value).item() if is_text else value.tobytes()
        request.raw_input_contents.append(raw)
    for name in wanted:
        request.outputs.add(name=name)
    return request


def output_arrays(answer: Any) -> dict[str, Array]:
    """Return the outputs of a ModelInferResponse, which are not texts, by name."""
    found: dict[str, Array] = {}
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        if output.datatype == "BF16":  # the upper half of an FP32
            value = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            value = np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        found[output.name] = value.reshape(output.shape)
    return found


def _means(reply: bytes, lengths: Array) -> Array:
    """Return the mean hidden states of rows, (B, E); the answer has zeros beyond their tokens."""
    hidden = output_arrays(schema.ModelInferResponse.FromString(reply))[HIDDEN]  # (B, S, E)
    return np.asarray(hidden.sum(1, dtype=np.float32) / lengths)


async def _ask(
    channel: grpc.aio.Channel, call: str, *, timeout_s: float = _READY_TIMEOUT_S, **fields: Any
) -> Any:
    request = getattr(schema, f"{call}Request")(**fields).SerializeToString()
    reply = await channel.unary_unary(SERVICE + call)(request, timeout=timeout_s)
    return getattr(schema, f"{call}Response").FromString(reply)


async def is_ready(channel: grpc.aio.Channel, models: Sequence[str]) -> bool:
    """Return whether a server says that it would answer requests to some models now."""
    asked = [_ask(channel, "ModelReady", name=name) for name in models]
    try:
        answers = await asyncio.gather(_ask(channel, "ServerReady"), *asked)
    except grpc.aio.AioRpcError:  # perhaps it does not listen yet
        return False
    return all(each.ready for each in answers)


async def await_ready(channel: grpc.aio.Channel) -> None:
    """Return once a server is ready."""
    while not await is_ready(channel, ()):
        await asyncio.sleep(_POLL_S)


async def triton_configs(upstream: Upstream) -> dict[str, Any]:
    """Return the configurations of the models of a server that is ready, by name."""
    channel = upstream.channel
    index = await _ask(channel, "RepositoryIndex", timeout_s=_OPENING_S)
    found = {}
    for name in sorted({model.name for model in index.models}):
        reply = await _ask(channel, "ModelConfig", timeout_s=_OPENING_S, name=name)
        found[name] = reply.config
    return found


def token_models(configs: Mapping[str, Any], repository: Path | None) -> list[ModelFacts]:
    """Return the models that complete or encode token ids, without sessions."""
    found = []
    for name, config in configs.items():
        inputs = frozenset(tensor.name for tensor in config.input)
        lengths = {"request_output_len", "max_output_len"} & inputs
        encodes = HIDDEN in (tensor.name for tensor in config.output)
        is_known = "input_ids" in inputs and (lengths or encodes)
        if not is_known or config.HasField("sequence_batching"):
            continue
        context_len, vocab_size = _model_limits(config, repository)
        facts = ModelFacts(
            name=name,
            inputs=inputs,
            max_rows=max(config.max_batch_size, 1),
            context_len=context_len,
            vocab_size=vocab_size,
            encoder_decoder="max_output_len" in inputs,
            streams=config.model_transaction_policy.decoupled,
            encodes=encodes,
            about=_about(config, repository),
        )
        found.append(facts)
    return found


def text_model(configs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the name of the model that encodes texts, or "", and its parameters."""
    name = next((each for each in _TEXT_MODELS if each in configs), "")
    if not name:
        return "", {}
    parameters = configs[name].parameters
    return name, {key: value.string_value for key, value in parameters.items()}


def _model_limits(config: Any, repository: Path | None) -> tuple[int, int | None]:
    """Return the most tokens of a sequence, and the size of the vocabulary if it is known.

    They come from the model's parameters and its config.ini.
    """
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    limit, folder = (
        int(parameters.get("max_seq_len", _DEFAULT_CONTEXT)),
        _folder(config, repository),
    )
    if folder is None:
        return limit, None
    _, model = read_config(folder)
    positions = getattr(model.architecture(), "max_pos_seq_len", None)
    return min(limit, positions or limit), getattr(model, "vocab_size", None)


def _folder(config: Any, repository: Path | None) -> Path | None:
    """Return the folder of a model's weights, None if it cannot be read here."""
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    folder, tp_size = (parameters.get(key) for key in ("model_checkpoint_path", "tensor_para_size"))
    if folder is None and repository is not None and tp_size is not None:
        folder = str(repository / config.name / "1" / f"{tp_size}-gpu")
    return Path(folder) if folder is not None and (Path(folder) / "config.ini").is_file() else None


def _about(config: Any, repository: Path | None) -> tuple[tuple[str, str], ...]:
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    identity = served_identity(_folder(config, repository), parameters)
    return tuple(identity.items())


def stream_error(text: str) -> RejectedError:
    """Return the error for a client where a stream ends with one."""
    kind, _, rest = text.partition(": ")
    return _error(rest, kind) if kind in _ON_STREAMS else _error(text, "INVALID_ARGUMENT")


def api_error(error: grpc.aio.AioRpcError) -> RejectedError:
    """Return the error for a client where the server answers with one."""
    return _error(error.details() or "", error.code().name)


def _error(text: str, code: str) -> RejectedError:
    status = _STATUS.get(code, HTTPStatus.INTERNAL_SERVER_ERROR)
    return RejectedError(without_internal_names(text) or "the model does not answer", status)
