"""Requests to a model as they are sent, in JSON or as messages of gRPC, and the responses.

Reading takes time in proportion to a request, and may be done in a process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from inference.backend.exchange import Array
from inference.decoding.rows import SessionTurn
from inference.front import validation
from inference.front.infer_messages import message_fields
from inference.front.sessions import Namespace
from inference.front.strict_json import parse_json
from inference.host.calls import InferError, InferRequest, Outputs
from inference.host.models import HostedModel
from inference.host.tensors import (
    DATATYPES,
    array_of,
    compact_json,
    datatype_of,
    json_elements,
    raw_of,
)

FINAL_PARAMETER = "triton_final_response"
EMPTY_PARAMETER = "triton_enable_empty_final_response"
_CONTENTS = {
    "BOOL": "bool", "BYTES": "bytes", "FP32": "fp32", "FP64": "fp64", "INT64": "int64",
    "UINT64": "uint64", **dict.fromkeys(("INT8", "INT16", "INT32"), "int"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint"),
}  # fmt: skip
_NO_DATA = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But no field is set"
)


@dataclass
class SentTensor:
    """An input; without an `array` its bytes follow, `size` of them if that is known."""

    name: str
    datatype: str
    shape: Sequence[int]
    array: Array | None = None
    size: int | None = None


@dataclass
class SentRequest:
    """A request without the bytes that follow it.

    `outputs` are names, each with whether it is wanted as bytes; `is_binary` holds for all others.
    """

    inputs: list[SentTensor]
    outputs: dict[str, bool] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    is_binary: bool = False

    def turn(self, sessions: Callable[[], Namespace]) -> SessionTurn | None:
        """Return the session of the request, with the server's own id of it."""
        session_id = self.parameters.get("sequence_id")
        if not session_id:
            return None
        flags = {f"{each}s": bool(self.parameters.get(f"sequence_{each}")) for each in _FLAGS}
        return SessionTurn(sessions().inside(session_id), **flags)


_FLAGS = ("start", "end")
# Parameters of a request that are read here.
_TAKEN = frozenset(
    {"binary_data_output", EMPTY_PARAMETER, *(f"sequence_{each}" for each in ("id", *_FLAGS))}
)


def read_infer(data: bytes, size_bytes: int) -> SentRequest:
    """Return what the JSON of a request to `infer` says. Raises RejectedError or InferError.

    The whole body has `size_bytes`.
    """
    request = parse_json(data)
    validation.check_form(request, size_bytes)
    inputs = []
    for each in request.get("inputs", ()):
        parameters = each.get("parameters") or {}
        name, datatype, shape = each["name"], each["datatype"], each["shape"]
        if datatype not in DATATYPES:
            raise InferError(f"invalid datatype for input {name}")
        if "data" in each:
            validation.check_data(each)
            values = list(validation.leaves(each["data"]))
            array = _array(values, datatype, name).reshape(shape)
            inputs.append(SentTensor(name, datatype, shape, array))
        elif "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            inputs.append(SentTensor(name, datatype, shape, size=size))
        else:
            raise InferError(_NO_DATA)
    asked = request.get("parameters") or {}
    is_binary = bool(asked.get("binary_data_output"))
    outputs = {
        each["name"]: bool((each.get("parameters") or {}).get("binary_data", is_binary))
        for each in request.get("outputs", ())
    }
    return SentRequest(inputs, outputs, asked, request.get("id", ""), is_binary)


def _array(values: Sequence[Any], datatype: str, name: str) -> Array:
    """Return values of JSON as an array of one dimension."""
    if datatype == "BYTES":
        texts = np.empty(len(values), np.object_)
        texts[:] = [value.encode() for value in values]
        return texts
    if datatype in ("FP16", "BF16"):
        raise InferError(
            f"input {name} has the type {datatype}, which is sent as binary data alone"
        )
    try:
        return np.array(values, DATATYPES[datatype])
    except OverflowError:
        raise InferError(f"input {name} has a number that {datatype} cannot hold") from None


def read_generate(data: bytes, datatypes: Mapping[str, str]) -> dict[str, Any]:
    """Return the values by name in the JSON of a request to `generate`. Raises RejectedError."""
    validation.check_generate(data, datatypes)
    request = parse_json(data)
    parameters = request.pop("parameters", {})
    return {**request, **parameters}


def generate_request(model: HostedModel, values: Mapping[str, Any]) -> InferRequest:
    """Return the request that values by name ask for. Raises InferError.

    A row fills the last axis of any size. What is not an input of the model is a parameter.
    """
    tensors, parameters = {}, dict[str, Any]()
    for name, value in values.items():
        if (facts := model.inputs.get(name)) is None:
            if name not in (*_TAKEN, "id"):
                parameters[name] = value
            continue
        row = value if isinstance(value, list) else [value]
        shape = model.shape(facts)
        free = max((n for n, size in enumerate(shape) if size == -1), default=None)
        sizes = [1 if size == -1 and n != free else size for n, size in enumerate(shape)]
        try:
            tensors[name] = _array(row, facts.datatype, name).reshape(sizes)
        except ValueError:
            raise InferError(
                f"input '{name}' of model '{model.name}' has the shape {shape}, and {len(row)} "
                "values were given"
            ) from None
    return InferRequest(tensors, id=str(values.get("id", "")), parameters=parameters)


def read_message(data: bytes, size_bytes: int) -> tuple[str, str, SentRequest]:
    """Return model, version and what a ModelInferRequest without its raw tensors says.

    Raises RejectedError or InferError.
    """
    message, fields = message_fields(data)
    validation.check_form(fields, size_bytes)
    inputs = []
    for each in message.inputs:
        if each.datatype not in DATATYPES:
            raise InferError(f"invalid datatype for input {each.name}")
        sent = SentTensor(each.name, each.datatype, list(each.shape))
        contents = getattr(each.contents, f"{_CONTENTS.get(each.datatype, 'bytes')}_contents")
        if len(contents):
            if len(contents) != math.prod(each.shape):
                raise InferError(
                    f"input '{each.name}' has {len(contents)} values, and the shape "
                    f"{list(each.shape)}"
                )
            values = np.empty(len(contents), DATATYPES[each.datatype])
            try:
                values[:] = contents
            except (ValueError, OverflowError):
                raise InferError(
                    f"input '{each.name}' has contents that {each.datatype} cannot hold; send "
                    "raw_input_contents"
                ) from None
            sent.array = values.reshape(sent.shape)
        inputs.append(sent)
    outputs = dict.fromkeys((each.name for each in message.outputs), True)
    sent_request = SentRequest(inputs, outputs, fields["parameters"], message.id)
    return message.model_name, message.model_version, sent_request


def with_bytes(
    model: HostedModel,
    sent: SentRequest,
    raw: Sequence[memoryview] | memoryview,
    sessions: Callable[[], Namespace],
) -> InferRequest:
    """Return a request to a model with the bytes that followed. Raises InferError.

    `raw` are those of each input without values, or of all, one after the other.
    """
    tensors: dict[str, Array] = {}
    about, at, number = f"[request id: {sent.id or '<id_unknown>'}] ", 0, 0
    for each in sent.inputs:
        if each.name in tensors:
            raise InferError(f"{about}input '{each.name}' already exists in request")
        if (facts := model.inputs.get(each.name)) is None:
            raise InferError(f"unexpected inference input '{each.name}' for model '{model.name}'")
        if each.datatype != facts.datatype:
            raise InferError(
                f"{about}inference input '{each.name}' data-type is '{each.datatype}', but model "
                f"'{model.name}' expects '{facts.datatype}'"
            )
        if each.array is not None:
            tensors[each.name] = each.array
            continue
        if isinstance(raw, memoryview):
            size = each.size or 0
            part = raw[at : at + size]
            at += size
            if len(part) < size:
                raise InferError(
                    f"unexpected size for input '{each.name}', expecting {size - len(part)} "
                    f"additional bytes for model '{model.name}'"
                )
        elif number < len(raw):
            part = raw[number]
            number += 1
        else:
            raise InferError(
                f"unable to find data for input tensor '{each.name}' for model '{model.name}' in "
                "request."
            )
        named = f"'{each.name}' for model '{model.name}'"
        tensors[each.name] = array_of(part, each.datatype, each.shape, name=named)
    if (isinstance(raw, memoryview) and at < len(raw)) or number < len(raw) * isinstance(raw, list):
        raise InferError(f"unexpected additional input data for model '{model.name}'")
    return InferRequest(
        tensors,
        tuple(sent.outputs),
        sent.turn(sessions),
        sent.id,
        parameters={name: each for name, each in sent.parameters.items() if name not in _TAKEN},
    )


def json_answer(
    model: HostedModel, sent: SentRequest, outputs: Outputs
) -> tuple[bytes, list[bytes]]:
    """Return the JSON of an answer to `infer`, and the bytes of the outputs that follow it."""
    described, raw = list[bytes](), list[bytes]()
    for name, value in outputs.items():
        entry: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(value),
            "shape": list(value.shape),
        }
        if sent.outputs.get(name, sent.is_binary) or entry["datatype"] in ("FP16", "BF16"):
            raw.append(raw_of(value))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
            described.append(compact_json(entry))
        else:
            start = compact_json({**entry, "data": []}).removesuffix(b"]}")
            described.append(b"".join((start, json_elements(value), b"]}")))
    about: dict[str, Any] = {"id": sent.id} if sent.id else {}
    about |= {"model_name": model.name, "model_version": model.version}
    if parameters := session_parameters(model, sent.parameters):
        about["parameters"] = parameters
    start = compact_json({**about, "outputs": []}).removesuffix(b"]}")
    return b"".join((start, b",".join(described), b"]}")), raw


def generated(
    model: HostedModel, request: InferRequest, values: Mapping[str, Any], outputs: Outputs
) -> bytes:
    """Return the JSON of an answer to `generate`: one value or a list for each output."""
    answer: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
    answer |= session_parameters(model, values)
    answer |= {"id": request.id} if request.id else {}
    fields = {name: compact_json(each) for name, each in answer.items()}
    for name, value in outputs.items():
        row = json_elements(value)
        fields[name] = row if math.prod(value.shape) == 1 else b"[%b]" % row
    named = (compact_json(name) + b":" + fields[name] for name in sorted(fields))
    return b"{%b}" % b",".join(named)


def session_parameters(model: HostedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an ensemble's answer: the session that the client has named."""
    if not model.config.HasField("ensemble_scheduling"):
        return {}
    return {
        "sequence_id": given.get("sequence_id", 0),
        **{f"sequence_{each}": bool(given.get(f"sequence_{each}")) for each in _FLAGS},
    }


def infer_response(model: HostedModel, sent: SentRequest, outputs: Outputs) -> Any:
    """Return the ModelInferResponse with some outputs."""
    answer = service_pb2.ModelInferResponse(
        model_name=model.name, model_version=model.version, id=sent.id
    )
    for key, value in session_parameters(model, sent.parameters).items():
        kind = (
            "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "string"
        )
        if kind == "int64":  # of 64 bits, with a sign there
            value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        setattr(answer.parameters[key], f"{kind}_param", value)
    for name, value in outputs.items():
        answer.outputs.add(name=name, datatype=datatype_of(value), shape=value.shape)
        answer.raw_output_contents.append(raw_of(value))
    return answer
