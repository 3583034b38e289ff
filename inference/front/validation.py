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
from typing import Any

from inference.front.declared_inputs import DeclaredInputs
from inference.front.guard import MalformedError
from inference.front.protocol_fields import (
    INDEX_FIELDS,
    INPUT_FIELDS,
    INPUT_PARAMETERS,
    OUTPUT_FIELDS,
    OUTPUT_PARAMETERS,
    OWN_PARAMETERS,
    REQUEST_FIELDS,
    REQUEST_PARAMETERS,
    Check,
    field_problem,
)
from inference.front.sessions import Namespace
from inference.front.strict_json import parse_json

MOST_ENTRIES = 256  # inputs, outputs or parameters of a request
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
    check_form(request, size_bytes, limit=limit, model=model)
    for each in request.get("inputs", ()):
        if "data" in each:
            _check_data(each)
    asked = request.get("parameters", {})
    if not asked.get("sequence_id"):
        return data
    asked["sequence_id"] = sessions.inside(asked["sequence_id"])
    return json.dumps(request, ensure_ascii=False).encode()


def check_form(
    request: dict[str, Any], size_bytes: int, *, limit: int, model: DeclaredInputs | None
) -> None:
    """Check a request to `infer` but for the values of its tensors; see `check_infer`."""
    check_fields("the request", request, REQUEST_FIELDS)
    _check_parameters("the request", _entry(request, "parameters", dict), REQUEST_PARAMETERS)
    _check_count("outputs", _entry(request, "outputs", list))
    names = []
    for name, each, parameters in _tensors(request, "inputs", INPUT_FIELDS, INPUT_PARAMETERS):
        names.append(each["name"])
        shape = _entry(each, "shape", list)
        if not all(type(size) is int for size in shape):
            raise MalformedError(f"the shape of input {name} is not a list of integers")
        _check_shape(name, shape, most=limit if _MEMORY in parameters else size_bytes)
        if each["datatype"] == "BYTES":
            check_texts(name, math.prod(shape))
    _check_required(model, names)
    for name, _, parameters in _tensors(request, "outputs", OUTPUT_FIELDS, OUTPUT_PARAMETERS):
        if _CLASSES in parameters:  # which no model here has
            raise MalformedError(f"output {name} has the parameter {_CLASSES}; leave it out")


def _tensors(
    request: dict[str, Any], key: str, fields: Mapping[str, Check], known: Mapping[str, Check]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the inputs or outputs with their names, as messages have them, and parameters."""
    entries, kind = _entry(request, key, list), key.removesuffix("s")
    _check_count(key, entries)
    for each in entries:
        if not isinstance(each, dict):
            raise MalformedError(f"an {kind} is not an object of JSON")
        name = repr(each.get("name"))[:40]
        required = ("name", "datatype", "shape") if kind == "input" else ("name",)
        if missing := [field for field in required if field not in each]:
            raise MalformedError(f"{kind} {name} has no {missing[0]}")
        check_fields(f"{kind} {name}", each, fields)
        # null stands for none, as in the server
        parameters = {} if each.get("parameters") is None else _entry(each, "parameters", dict)
        _check_parameters(f"{kind} {name}", parameters, known)
        yield name, each, parameters


def check_fields(of: str, values: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Check the types of some values of a request. Raises MalformedError."""
    if problem := field_problem(values, checks):
        raise MalformedError(f"{of}: {problem}")


def _check_parameters(of: str, parameters: dict[str, Any], checks: Mapping[str, Check]) -> None:
    _check_count("parameters", parameters)
    if any("\0" in key for key in parameters):
        raise MalformedError(f"{of}: the name of a parameter has a null character")
    if problem := field_problem(parameters, checks):
        raise MalformedError(f"{of}: parameter {problem}")


def _check_data(tensor: dict[str, Any]) -> None:
    """Check that the values of a tensor are as many as its shape says, and fit its type.

    Of an integer that does not fit, tritonserver would keep the low bits.
    """
    name, datatype, shape = repr(tensor["name"])[:40], tensor["datatype"], tensor["shape"]
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


def _check_required(model: DeclaredInputs | None, given: Collection[Any]) -> None:
    missing = [name for name in model.required if name not in given] if model else []
    if missing:
        raise MalformedError(
            f"the request lacks {', '.join(map(repr, missing))}, which the model requires"
        )


def check_index(data: bytes) -> None:
    """Check the body of a request for the list of models. Raises MalformedError."""
    check_fields("the request", parse_json(data), INDEX_FIELDS)


def check_generate(data: bytes, model: DeclaredInputs | None) -> None:
    """Check the body of a request to `generate`.

    Args:
        data: JSON. Inputs may also stand among its parameters.
        model: Inputs of the model, None if they are unknown.

    Raises:
        MalformedError: It has another form, or a value of another type than its input.
    """
    request = parse_json(data)
    check_fields("the request", request, {**REQUEST_FIELDS, **OWN_PARAMETERS})
    parameters = _entry(request, "parameters", dict)
    _check_count("inputs", request)
    _check_parameters("the request", parameters, OWN_PARAMETERS)
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
    least, most = _INTEGERS.get(datatype, (-math.inf, math.inf))
    for value in values:
        if type(value) not in kinds:
            text = json.dumps(value)[:40]
            raise MalformedError(f"input {name} has {text}; {datatype} takes {expected}")
        if datatype in _INTEGERS and not least <= value <= most:
            text = str(value)[:40]
            raise MalformedError(f"input {name} has {text}, which {datatype} cannot hold")


def _check_shape(name: str, shape: Sequence[int], *, most: int) -> None:
    """Check a shape against the number of elements that can have been sent."""
    if len(shape) > _MOST_DIMENSIONS:
        raise MalformedError(
            f"input {name} has {len(shape)} dimensions, {_MOST_DIMENSIONS} at most"
        )
    text = str(list(shape))[:100]
    if any(size < 0 for size in shape) or (shape and shape[0] == 0):
        raise MalformedError(f"input {name} has the shape {text}; sizes are positive")
    # An empty tensor has sizes too, by which a reader may multiply or loop.
    if math.prod(size or 1 for size in shape) > most:
        raise MalformedError(f"input {name} has the shape {text}, and fewer elements were sent")


def check_texts(name: str, count: int) -> None:
    """Check the number of texts of an input. Raises MalformedError."""
    if count > MOST_TEXTS:
        raise MalformedError(f"input {name} has {count} texts, {MOST_TEXTS} at most")


def _entry(of: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = of.get(key, kind())
    if not isinstance(value, kind):
        raise MalformedError(f"{key!r} is not {'a list' if kind is list else 'an object'} of JSON")
    return value


def _check_count(name: str, entries: Any) -> None:
    if len(entries) > MOST_ENTRIES:
        raise MalformedError(f"the request has {len(entries)} {name}, {MOST_ENTRIES} at most")
