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
from inference.backend.text_models import pad_rows
from inference.front.guard import RejectedError
from inference.front.openai.answers import Array, Candidate
from inference.front.openai.prepare import ModelFacts
from inference.front.rules import INFER_CALL, SERVICE, STREAM_CALL, without_internal_names
from inference.front.upstream import Upstream
from inference.streams import STREAM_PARAMETER

_TEXT_MODELS = ("preprocessing", "tokenizer")  # of models that generate, and of encoders
_HIDDEN = "output_hidden_state"
_READY_TIMEOUT_S = 2.0
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
        self._streams = upstream.streams
        self._cancellations = upstream.cancellations

    async def generate(
        self, job: Mapping[str, Array], *, streams: bool
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        """Yield the candidates, whole, and before as they grow. Closing it cancels the job.

        `job` holds the inputs. Without `streams` candidates that still grow need not come. Raises
        RejectedError if the model refuses the request, or cannot answer.
        """
        wanted = ["output_ids", "sequence_length"]
        wanted += _SCORES if "num_log_probs" in job else ()
        wanted += ["cum_log_probs"] if "is_return_log_probs" in job else ()
        request = infer_request(self.facts.name, job, wanted)
        prompt_len = 0 if self.facts.encoder_decoder else job["input_ids"].shape[1]
        with self._streams.stream() as (name, came):
            if len(wanted) == 2:  # scores come with the server's answers alone
                request.parameters[STREAM_PARAMETER].string_param = name if streams else ""
            data = request.SerializeToString()
            call = self._stream([data]) if self.facts.streams else self._infer(data)
            reading = asyncio.ensure_future(pass_on(call, came, streams=self.facts.streams))
            rows: list[list[int]] | None = [[] for _ in job["input_ids"]]
            try:
                while (each := await came.get()) is not None:
                    if isinstance(each, Exception):
                        raise each
                    if not isinstance(each, list):
                        rows = None  # it has everything
                        yield _candidates(each, prompt_len)
                    elif rows is not None:
                        for row, new in zip(rows, each, strict=True):
                            row += new
                        if came.empty() or not self._streams.is_behind:
                            yield [Candidate(row) for row in rows]
            finally:
                if not reading.done():  # the client has left, or has what it wanted
                    self._cancellations.add(call)

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return each row's mean hidden state, scaled to length 1, (B, E). Raises RejectedError."""
        found = []
        for first in range(0, len(rows), self.facts.max_rows):
            ids, lengths = pad_rows(rows[first : first + self.facts.max_rows], pad_id=0)
            tensors = {"input_ids": ids, "sequence_length": lengths}
            request = infer_request(self.facts.name, tensors, [_HIDDEN]).SerializeToString()
            try:
                reply = await self._infer(request)
            except grpc.aio.AioRpcError as error:
                raise api_error(error) from error
            found.append(await asyncio.to_thread(_means, reply, lengths))
        means = np.concatenate(found)
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        return np.asarray(means / np.maximum(norms, np.finfo(np.float32).tiny))


async def pass_on(call: Any, into: asyncio.Queue[Any], *, streams: bool) -> None:
    """Put the answers of a call into a queue, then the error for the client, or None.

    They are the server's, one or, where it `streams`, any number.
    """
    try:
        if not streams:
            into.put_nowait(schema.ModelInferResponse.FromString(await call))
        else:
            async for reply in call:
                answer = schema.ModelStreamInferResponse.FromString(reply)
                if answer.error_message:
                    raise stream_error(answer.error_message)
                into.put_nowait(answer.infer_response)
    except grpc.aio.AioRpcError as error:
        into.put_nowait(api_error(error))
    except asyncio.CancelledError:  # of the call: its reader has left, or the server is leaving
        into.put_nowait(_error("", "UNAVAILABLE"))
    except Exception as error:  # its reader raises it
        into.put_nowait(error)
    else:
        into.put_nowait(None)


def _candidates(answer: Any, prompt_len: int) -> list[Candidate]:
    """Return the candidates of a ModelInferResponse, which returns so many tokens of the prompt."""
    outputs = output_arrays(answer)
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
    hidden = output_arrays(schema.ModelInferResponse.FromString(reply))[_HIDDEN]  # (B, S, E)
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


async def served_models(
    upstream: Upstream,
) -> tuple[dict[str, TritonModel], str, dict[str, str]]:
    """Return the models that complete or encode token ids, without sessions, and a text model.

    The server is ready. Of the model that encodes texts the name, or "", and the parameters are
    returned.
    """
    channel = upstream.channel
    index = await _ask(channel, "RepositoryIndex", timeout_s=_OPENING_S)
    found: dict[str, TritonModel] = {}
    texts: dict[str, dict[str, str]] = {}
    for name in sorted({model.name for model in index.models}):
        reply = await _ask(channel, "ModelConfig", timeout_s=_OPENING_S, name=name)
        config = reply.config
        if name in _TEXT_MODELS:
            texts[name] = {key: value.string_value for key, value in config.parameters.items()}
        inputs = frozenset(tensor.name for tensor in config.input)
        lengths = {"request_output_len", "max_output_len"} & inputs
        encodes = _HIDDEN in (tensor.name for tensor in config.output)
        is_known = "input_ids" in inputs and (lengths or encodes)
        if not is_known or config.HasField("sequence_batching"):
            continue
        context_len, vocab_size = _model_limits(config, upstream.repository)
        facts = ModelFacts(
            name=name,
            inputs=inputs,
            max_rows=max(config.max_batch_size, 1),
            context_len=context_len,
            vocab_size=vocab_size,
            encoder_decoder="max_output_len" in inputs,
            streams=config.model_transaction_policy.decoupled,
            encodes=encodes,
        )
        found[name] = TritonModel(upstream, facts)
    text_model = next((name for name in _TEXT_MODELS if name in texts), "")
    return found, text_model, texts.get(text_model, {})


def _model_limits(config: Any, repository: Path | None) -> tuple[int, int | None]:
    """Return the most tokens of a sequence, and the size of the vocabulary if it is known.

    They come from the model's parameters and its config.ini.
    """
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    limit = int(parameters.get("max_seq_len", _DEFAULT_CONTEXT))
    folder, tp_size = (parameters.get(key) for key in ("model_checkpoint_path", "tensor_para_size"))
    if folder is None and repository is not None and tp_size is not None:
        folder = str(repository / config.name / "1" / f"{tp_size}-gpu")
    if folder is None or not (Path(folder) / "config.ini").is_file():
        return limit, None
    _, model = read_config(Path(folder))
    positions = getattr(model.architecture(), "max_pos_seq_len", None)
    return min(limit, positions or limit), getattr(model, "vocab_size", None)


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
