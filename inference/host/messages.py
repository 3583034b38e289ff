"""Decoding of requests with binary tensors, and encoding of responses as JSON and for gRPC."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from inference.backend.requests import Array, InferRequest, Outputs
from inference.decoding.rows import SessionTurn
from inference.front.rules import InferError
from inference.front.sessions import Namespace
from inference.front.validation import RequestParameters, SentRequest, SentTensor
from inference.host.models import HostedModel
from inference.host.tensors import DATATYPE_NAMES, array_of, compact_json, json_elements, raw_of

FINAL_PARAMETER = "triton_final_response"
_PARAMETER_FIELDS = {
    bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"
}  # fmt: skip
_quoted = functools.lru_cache(maxsize=1024)(compact_json)  # for names of models and outputs
# Parameters of `generate` for other servers' scheduling and streaming; accepted and ignored.
_WITHOUT_EFFECT = frozenset({"priority", "timeout", "stream"})


def check_parameters(model: HostedModel, sent: SentRequest) -> None:
    """Refuse parameters that are neither inputs nor known to the protocol.

    This project's models would ignore them. Raises InferError.
    """
    unknown = sorted(sent.parameters.others().keys() - _WITHOUT_EFFECT)
    if unknown and not model.takes_parameters:
        raise InferError(
            f"model '{model.name}' takes no {', '.join(unknown)[:200]}; its inputs are "
            f"{', '.join(sorted(model.inputs))}"
        )


def _turn(parameters: RequestParameters, sessions: Callable[[], Namespace]) -> SessionTurn | None:
    """Return the session turn of a request, None if it belongs to no session."""
    if not parameters.sequence_id:
        return None
    return SessionTurn(
        sessions().inside(parameters.sequence_id),
        starts=parameters.sequence_start,
        ends=parameters.sequence_end,
    )


def parts_of(sent: SentRequest, rest: memoryview) -> list[memoryview]:
    """Split the bytes that follow the JSON of a request into those of each binary input.

    Raises InferError if their number differs from the sum of `binary_data_size`.
    """
    parts, end = list[memoryview](), 0
    for tensor in sent.inputs:
        if tensor.data is None:
            if (size := tensor.parameters.binary_data_size) is None:
                raise InferError(f"input '{tensor.name}' has neither data nor binary_data_size")
            parts.append(rest[end : end + size])
            end += size
    if end != len(rest):
        raise InferError(
            f"unexpected additional input data, or too little: {len(rest)} bytes follow the JSON, "
            f"and the inputs' binary_data_size is {end} in all"
        )
    return parts


def with_bytes(
    model: HostedModel,
    sent: SentRequest,
    raw: Sequence[memoryview],
    sessions: Callable[[], Namespace],
) -> InferRequest:
    """Return a request to a model; `raw` holds the bytes of each input without `data`.

    Raises InferError.
    """
    tensors: dict[str, Array] = {}
    parts, matches = iter(raw), sent.matched_model is model
    for tensor in sent.inputs:
        if not matches:
            _check_type(model, sent, tensor, tensors)
        if tensor.data is not None:
            tensors[tensor.name] = tensor.data
            continue
        named = f"'{tensor.name}' for model '{model.name}'"
        if (part := next(parts, None)) is None:
            raise InferError(f"unable to find data for input tensor {named} in request.")
        value = array_of(part, tensor.datatype, tensor.shape, name=named)
        tensors[tensor.name] = value.astype(np.float32) if tensor.datatype == "BF16" else value
    if next(parts, None) is not None:
        raise InferError(f"unexpected additional input data for model '{model.name}'")
    turn, wanted = _turn(sent.parameters, sessions), [output.name for output in sent.outputs]
    others = sent.parameters.others() if model.takes_parameters else {}
    return InferRequest(tensors, wanted, turn, sent.id, parameters=others, matches=matches)


def _check_type(
    model: HostedModel, sent: SentRequest, tensor: SentTensor, before: Mapping[str, Array]
) -> None:
    """Refuse a duplicate input, or one with another type than the model's. Raises InferError."""
    about = f"[request id: {sent.id or '<id_unknown>'}] "
    if tensor.name in before:
        raise InferError(f"{about}input '{tensor.name}' already exists in request")
    expected, _ = model.forms.get(tensor.name, (tensor.datatype, ()))
    if tensor.datatype != expected:
        raise InferError(
            f"{about}inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
            f"'{model.name}' expects '{expected}'"
        )


def json_answer(
    model: HostedModel, sent: SentRequest, outputs: Outputs
) -> tuple[bytes, list[bytes]]:
    """Return the JSON of an answer to `infer`, and the binary outputs that follow it."""
    described, raw = list[bytes](), list[bytes]()
    for name, value in outputs.items():
        datatype, shape = DATATYPE_NAMES[value.dtype], ",".join(map(str, value.shape))
        start = b'{"name":%b,"datatype":"%b","shape":[%b],' % (
            _quoted(name), datatype.encode(), shape.encode()
        )  # fmt: skip
        if sent.wants_bytes(name) or datatype in ("FP16", "BF16"):
            raw.append(raw_of(value))
            rest = b'"parameters":{"binary_data_size":%d}}' % len(raw[-1])
        else:
            rest = b'"data":[%b]}' % json_elements(value)
        described.append(start + rest)
    about = [b'"id":' + compact_json(sent.id)] if sent.id else []
    about += [b'"model_name":' + _quoted(model.name), b'"model_version":' + _quoted(model.version)]
    if parameters := session_parameters(model, sent.parameters):
        about.append(b'"parameters":' + compact_json(parameters))
    about.append(b'"outputs":[%b]' % b",".join(described))
    return b"{%b}" % b",".join(about), raw


def generated(model: HostedModel, sent: SentRequest, outputs: Outputs) -> bytes:
    """Return the JSON of an answer to `generate`: a single value or a list for each output."""
    answer = {"model_name": model.name, "model_version": model.version}
    answer |= session_parameters(model, sent.parameters)
    answer |= {"id": sent.id} if sent.id else {}
    fields = {name: compact_json(value) for name, value in answer.items()}
    for name, value in outputs.items():
        row = json_elements(value)
        fields[name] = row if math.prod(value.shape) == 1 else b"[%b]" % row
    named = (compact_json(name) + b":" + fields[name] for name in sorted(fields))
    return b"{%b}" % b",".join(named)


def session_parameters(model: HostedModel, parameters: RequestParameters) -> dict[str, Any]:
    """Return the parameters of an ensemble's answer: the client's session, as Triton does."""
    if not model.is_ensemble:
        return {}
    return parameters.model_dump(include={"sequence_id", "sequence_start", "sequence_end"})


def infer_response(model: HostedModel, sent: SentRequest, outputs: Outputs) -> Any:
    """Return the ModelInferResponse with these outputs."""
    answer = service_pb2.ModelInferResponse(
        model_name=model.name, model_version=model.version, id=sent.id
    )
    set_parameters(answer, session_parameters(model, sent.parameters))
    for name, value in outputs.items():
        datatype = DATATYPE_NAMES[value.dtype]
        answer.outputs.add(name=name, datatype=datatype, shape=value.shape)
        answer.raw_output_contents.append(raw_of(value))
    return answer


def set_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    """Set the parameters of a request's or a response's message."""
    for name, value in parameters.items():
        if type(value) is int:  # ids are unsigned, the field is signed
            value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        setattr(message.parameters[name], _PARAMETER_FIELDS[type(value)], value)
