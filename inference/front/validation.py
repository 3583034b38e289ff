"""Reject requests that would crash, hang or exhaust tritonserver 2.51.

Server 2.51 recurses once for each level of JSON, multiplies the sizes of a shape without looking
for an overflow, searches all inputs for every input, never answers a batch of no sequences, and
aborts when a stream or an ensemble is asked for the classes of a text. It counts the inputs of a
request, and takes an optional one for a required one. A request of a kilobyte is
enough to end it. It reads a checked request as it was read here: a body of JSON has one meaning,
and no shape is larger than what was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NoReturn

from export_scripts.wire_format import WireFormatError, wire_fields
from inference.front.declared_inputs import DeclaredInputs
from inference.front.guard import RequestRefusedError
from inference.front.protocol_fields import (
    INPUT_FIELDS,
    INPUT_PARAMETERS,
    OUTPUT_FIELDS,
    OUTPUT_PARAMETERS,
    REQUEST_FIELDS,
    REQUEST_PARAMETERS,
    SEQUENCE_TEXT,
    Check,
    field_problem,
    is_sequence_text,
)
from inference.front.sessions import Namespace

MOST_JSON_MB = 8
_MOST_JSON_BYTES = MOST_JSON_MB << 20
_MOST_ENTRIES = 256  # inputs, outputs or parameters of a request
_MOST_LEVELS = 32
_MOST_DIMENSIONS = 16
# Of one tensor: a text without a character takes four bytes here and some hundred in a model.
MOST_TEXTS = 1 << 16
_MOST_DIGITS = 20
_INTEGERS = {
    f"{sign}INT{bits}": (0, (1 << bits) - 1) if sign else (-(1 << bits - 1), (1 << bits - 1) - 1)
    for sign in ("", "U")
    for bits in (8, 16, 32, 64)
}
# JSON without types: what `generate` takes for each type; all others are numbers.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_INTEGERS, ((int,), "an integer")),
    "BYTES": ((str,), "a string"),
    "BOOL": ((bool,), "true or false"),
}
_FLOATS = ("FP32", "FP64")  # those that `infer` takes in JSON
_NUMBER: tuple[tuple[type, ...], str] = ((int, float), "a number")
_MEMORY = "shared_memory_region"
_CLASSES = "classification"
# Of gRPC: service_pb2.ModelInferRequest.
_MOST_FIELDS = 4 * _MOST_ENTRIES + 16
_RAW_INPUT_CONTENTS = 7
_NOT_A_REQUEST = "the message is not a ModelInferRequest"


class MalformedError(RequestRefusedError):
    """A request of a form that is not passed on."""

    def __init__(self, reason: str) -> None:
        super().__init__(HTTPStatus.BAD_REQUEST, reason)

    def __reduce__(self) -> tuple[type[MalformedError], tuple[str]]:
        return MalformedError, (str(self),)


def length_of_json(header: str | None, size_bytes: int) -> int:
    """Return how much of the body of a request to `infer` is JSON; tensors follow.

    Args:
        header: Inference-Header-Content-Length; without it all of it is JSON.
        size_bytes: Size of the body.

    Raises:
        MalformedError: It is not a length within the body.
    """
    if header is None:
        return size_bytes
    # Twenty digits are more than any size has; int() refuses some thousands.
    is_number = header.isascii() and header.isdigit() and len(header) <= _MOST_DIGITS
    if not is_number or int(header) > size_bytes:
        raise MalformedError(
            f"Inference-Header-Content-Length: {header[:40]} is not a length within a "
            f"body of {size_bytes} bytes"
        )
    return int(header)


def check_infer(
    data: bytes, size_bytes: int, limit: int, model: DeclaredInputs | None, sessions: Namespace
) -> bytes:
    """Return the JSON of a request to `infer` with the server's own id of its session.

    Args:
        data: JSON.
        size_bytes: Size of the whole body.
        limit: Bytes of the largest request; a tensor in shared memory has no more elements.
        model: Inputs of the model, None if they are unknown.
        sessions: Those of the client.

    Raises:
        MalformedError: It has another form.
    """
    request = parse_json(data)
    _check_fields("the request", request, REQUEST_FIELDS)
    asked = _entry(request, "parameters", dict)
    _check_parameters("the request", asked, REQUEST_PARAMETERS)
    _check_count("outputs", _entry(request, "outputs", list))
    names = []
    for name, each, parameters in _tensors(request, "inputs", INPUT_FIELDS, INPUT_PARAMETERS):
        names.append(each["name"])
        shape = _entry(each, "shape", list)
        if not all(type(size) is int for size in shape):
            raise MalformedError(f"the shape of input {name} is not a list of integers")
        most = limit if _MEMORY in parameters else size_bytes
        check_shape(name, shape, each["datatype"], most=most)
        if "data" in each:
            _check_data(each, shape)
    _check_required(model, names)
    for name, _, parameters in _tensors(request, "outputs", OUTPUT_FIELDS, OUTPUT_PARAMETERS):
        _check_classes(name, parameters)
    if not asked.get("sequence_id"):
        return data
    asked["sequence_id"] = sessions.inside(asked["sequence_id"])
    return json.dumps(request, ensure_ascii=False).encode()


def _tensors(
    request: dict[str, Any], key: str, fields: Mapping[str, Check], known: Mapping[str, Check]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the inputs or outputs with their names, as messages have them, and parameters."""
    entries, kind = _entry(request, key, list), key.removesuffix("s")
    _check_count(key, entries)
    for each in entries:
        if not isinstance(each, dict):
            raise MalformedError(f"an {kind} is not an object of JSON")
        name = _short(each)
        required = ("name", "datatype", "shape") if kind == "input" else ("name",)
        if missing := [field for field in required if field not in each]:
            raise MalformedError(f"{kind} {name} has no {missing[0]}")
        _check_fields(f"{kind} {name}", each, fields)
        # null stands for none, as in the server
        parameters = {} if each.get("parameters") is None else _entry(each, "parameters", dict)
        _check_parameters(f"{kind} {name}", parameters, known)
        yield name, each, parameters


def _check_fields(of: str, values: dict[str, Any], checks: Mapping[str, Check]) -> None:
    if problem := field_problem(values, checks):
        raise MalformedError(f"{of}: {problem}")


def _check_parameters(of: str, parameters: dict[str, Any], checks: Mapping[str, Check]) -> None:
    _check_count("parameters", parameters)
    if problem := field_problem(parameters, checks):
        raise MalformedError(f"{of}: parameter {problem}")


def _check_classes(name: str, parameters: Any) -> None:
    """Check that an output is not asked for as classes, which no model here has."""
    if _CLASSES in parameters:
        raise MalformedError(f"output {name} has the parameter {_CLASSES}; leave it out")


def _check_data(tensor: dict[str, Any], shape: Sequence[int]) -> None:
    """Check that the values of a tensor are as many as its shape says, and fit its type.

    Of an integer that does not fit, tritonserver would keep the low bits.
    """
    name, datatype = _short(tensor), tensor["datatype"]
    values = list(_leaves(_entry(tensor, "data", list)))
    if len(values) != math.prod(shape):
        text = str(list(shape))[:100]
        raise MalformedError(
            f"input {name} has the shape {text}, {math.prod(shape)} elements, and {len(values)} in "
            "its data"
        )
    if datatype in _KINDS or datatype in _FLOATS:
        _check_values(name, values, datatype)


def _leaves(data: list[Any]) -> Iterator[Any]:
    pending = [data]
    while pending:
        for value in pending.pop():
            if isinstance(value, list):
                pending.append(value)
            else:
                yield value


def _check_range(name: str, value: int, datatype: str) -> None:
    least, most = _INTEGERS[datatype]
    if not least <= value <= most:
        raise MalformedError(f"input {name} has {str(value)[:40]}, which {datatype} cannot hold")


def _check_required(model: DeclaredInputs | None, given: Collection[Any]) -> None:
    missing = [name for name in model.required if name not in given] if model else []
    if missing:
        raise MalformedError(
            f"the request lacks {', '.join(map(repr, missing))}, which the model requires"
        )


def check_json(data: bytes) -> None:
    """Check that data is an object of JSON. Raises MalformedError."""
    parse_json(data)


def check_generate(data: bytes, model: DeclaredInputs | None) -> None:
    """Check the body of a request to `generate`.

    Args:
        data: JSON. Inputs may also stand among its parameters.
        model: Inputs of the model, None if they are unknown.

    Raises:
        MalformedError: It has another form, or a value of another type than its input.
    """
    request = parse_json(data)
    _check_fields("the request", request, REQUEST_FIELDS)
    parameters = _entry(request, "parameters", dict)
    _check_count("inputs", request)
    _check_count("parameters", parameters)
    if model is None:
        return
    _check_required(model, request.keys() | parameters.keys())
    for name, value in (*request.items(), *parameters.items()):
        if name in model.datatypes:
            _check_kinds(repr(name)[:40], value, model.datatypes[name])


def _check_kinds(name: str, data: Any, datatype: str) -> None:
    """Check the values of an input in JSON without types, which is one row."""
    values = list(_leaves([data]))
    if isinstance(data, list) and len(values) != len(data):
        raise MalformedError(
            f"input {name} is a list of lists; generate takes one row as a flat list, infer several"
        )
    _check_values(name, values, datatype)


def _check_values(name: str, values: Collection[Any], datatype: str) -> None:
    kinds, expected = _KINDS.get(datatype, _NUMBER)
    for value in values:
        if type(value) not in kinds:
            text = json.dumps(value)[:40]
            raise MalformedError(f"input {name} has {text}; {datatype} takes {expected}")
        if datatype in _INTEGERS:
            _check_range(name, value, datatype)


def without_raw_tensors(data: bytes) -> tuple[bytes, list[slice]]:
    """Return a ModelInferRequest of gRPC without its raw tensors, and the places of these.

    No field is parsed: two bytes of a message can take a hundred bytes of memory.

    Raises:
        MalformedError: It is something else, or has more fields or more bytes outside of raw
            tensors than a request needs.
    """
    kept, raw = bytearray(), []
    try:
        for count, field in enumerate(wire_fields(data), start=1):
            if count > _MOST_FIELDS:
                raise MalformedError(f"the request has more than {_MOST_FIELDS} fields")
            if field.number == _RAW_INPUT_CONTENTS:
                raw.append(field.place)
            else:
                kept += data[field.place]
            if len(kept) > _MOST_JSON_BYTES:
                raise MalformedError(
                    f"a request may have {MOST_JSON_MB} MiB outside of raw_input_contents; send "
                    "large tensors there"
                )
    except WireFormatError:
        raise MalformedError(_NOT_A_REQUEST) from None
    return bytes(kept), raw


def check_infer_message(
    data: bytes,
    size_bytes: int,
    limit: int,
    models: Mapping[str, DeclaredInputs],
    sessions: Namespace,
) -> bytes | None:
    """Check a ModelInferRequest of gRPC `without_raw_tensors`, as `check_infer` does.

    Returns:
        The message with the server's own id of its session, None if it has no session.

    Raises:
        MalformedError: It has another form.
    """
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2

    try:
        message = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        raise MalformedError(_NOT_A_REQUEST) from None
    check_message(message, size_bytes, limit=limit)
    _check_required(models.get(message.model_name), [each.name for each in message.inputs])
    return _with_own_session(message, sessions)


def _with_own_session(message: Any, sessions: Namespace) -> bytes | None:
    if "sequence_id" not in message.parameters:
        return None
    parameter = message.parameters["sequence_id"]
    kind = parameter.WhichOneof("parameter_choice")
    own = sessions.inside(getattr(parameter, kind)) if kind else 0
    if isinstance(own, str):
        parameter.string_param = own
    else:
        parameter.int64_param = own
    return bytes(message.SerializeToString())


def check_message(message: Any, size_bytes: int, *, limit: int) -> None:
    """Check a parsed ModelInferRequest, of `size_bytes` with raw tensors. Raises MalformedError."""
    for name in ("inputs", "outputs", "parameters"):
        _check_count(name, getattr(message, name))
    for each in (*message.inputs, *message.outputs):
        _check_count("parameters", each.parameters)
    if "sequence_id" in message.parameters:
        text = message.parameters["sequence_id"].string_param
        if not is_sequence_text(text):
            raise MalformedError(
                f"the request: parameter sequence_id is {json.dumps(text)[:40]}; expected "
                f"{SEQUENCE_TEXT}"
            )
    for each in message.outputs:
        _check_classes(repr(each.name[:40]), each.parameters)
    for each in message.inputs:
        name = repr(each.name[:40])
        most = limit if _MEMORY in each.parameters else size_bytes
        check_shape(name, each.shape, each.datatype, most=most)
        _check_texts(name, len(each.contents.bytes_contents))


def check_shape(name: str, shape: Sequence[int], datatype: str, *, most: int) -> None:
    """Check the shape of an input against the number of elements that can have been sent.

    Raises:
        MalformedError: It has too many dimensions or elements, or none in the first dimension.
    """
    if len(shape) > _MOST_DIMENSIONS:
        raise MalformedError(
            f"input {name} has {len(shape)} dimensions, {_MOST_DIMENSIONS} at most"
        )
    if any(size < 0 for size in shape) or (shape and shape[0] == 0):
        text = str(list(shape))[:100]
        raise MalformedError(f"input {name} has the shape {text}; sizes are positive")
    # An empty tensor has sizes too, by which a reader may multiply or loop.
    if math.prod(size or 1 for size in shape) > most:
        text = str(list(shape))[:100]
        raise MalformedError(f"input {name} has the shape {text}, and fewer elements were sent")
    if datatype == "BYTES":
        _check_texts(name, math.prod(shape))


def _check_texts(name: str, count: int) -> None:
    if count > MOST_TEXTS:
        raise MalformedError(f"input {name} has {count} texts, {MOST_TEXTS} at most")


def parse_json(data: bytes) -> dict[str, Any]:
    """Return an object of JSON that every parser reads alike.

    Raises:
        MalformedError: It is something else, larger than MOST_JSON_MB or too deep.
    """
    if len(data) > _MOST_JSON_BYTES:
        raise MalformedError(
            f"the JSON of a request may have {MOST_JSON_MB} MiB; send large tensors as binary data"
        )
    too_deep = MalformedError(f"the JSON has more than {_MOST_LEVELS} levels")
    hooks: dict[str, Any] = {"parse_float": _finite, "parse_constant": _refuse}
    try:
        value = json.loads(data.decode(), object_pairs_hook=_object, **hooks)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        raise MalformedError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise MalformedError("the body is not an object of JSON")
    if b"\\u" in data:
        _check_surrogates(value)
    containers: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        containers = [
            inner
            for outer in containers
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if containers:
        raise too_deep
    return value


def _check_surrogates(request: dict[str, Any]) -> None:
    """Check that no text has half of a character that UTF-16 writes as two."""
    key = ""
    try:
        for key, value in request.items():
            json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = json.dumps(key)[:100]
        raise MalformedError(f"{name} has half of a surrogate pair") from None
    except RecursionError:
        raise MalformedError(f"the JSON has more than {_MOST_LEVELS} levels") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")  # parsers differ in which one counts
    if any("\0" in key for key in made):
        raise ValueError("a key has a null character")  # at which tritonserver ends it
    return made


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:40]} is out of range")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


def _entry(of: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = of.get(key, kind())
    if not isinstance(value, kind):
        raise MalformedError(f"{key!r} is not {'a list' if kind is list else 'an object'} of JSON")
    return value


def _check_count(name: str, entries: Any) -> None:
    if len(entries) > _MOST_ENTRIES:
        raise MalformedError(f"the request has {len(entries)} {name}, {_MOST_ENTRIES} at most")


def _short(of: dict[str, Any]) -> str:
    return repr(of.get("name"))[:40]
