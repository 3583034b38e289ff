"""The form of requests, and how much of everything they may have.

A body of JSON has one meaning, no shape is larger than what was sent, and what is wrong is refused
with its value and what was expected.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from inference.front.guard import RejectedError
from inference.front.strict_json import parse_json
from inference.system.supervision import OWN_PREFIX

MOST_ENTRIES = 256  # inputs, outputs or parameters of a request
_MOST_DIMENSIONS = 16
# One tensor's: a text without a character takes four bytes here and some hundred in a model.
MOST_TEXTS = 1 << 16
MOST_SEQUENCE_ID_BYTES = 128  # of one that is a text
_MOST_DIGITS = 20
_MOST_SHOWN = 40  # characters of a name or a value in a reason
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

Check = tuple[Callable[[Any], bool], str]  # whether a value passes, and what is expected
Checks = Mapping[str, Check]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _INTEGERS["UINT64"][1]


_TEXT: Check = (_is_text, "a text without a null character")
_NUMBER: Check = (_is_number, f"a whole number from 0 to {_INTEGERS['UINT64'][1]}")
_FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
_SEQUENCE_ID: Check = (
    lambda e: (_is_text(e) and len(e.encode()) <= MOST_SEQUENCE_ID_BYTES) or _is_number(e),
    f"a text of up to {MOST_SEQUENCE_ID_BYTES} bytes without a null character, or {_NUMBER[1]}",
)
# Parameters that are whole numbers without a sign; those of others may have one.
WHOLE_NUMBERS = ("sequence_id", "priority", "timeout", "binary_data_size")
_REQUEST_FIELDS: Checks = {"id": _TEXT}
MODEL_FIELDS: Checks = dict.fromkeys(("model_name", "model_version"), _TEXT)  # gRPC
_REQUEST_PARAMETERS: Checks = {
    "sequence_id": _SEQUENCE_ID,
    **dict.fromkeys(("sequence_start", "sequence_end", "binary_data_output"), _FLAG),
    **dict.fromkeys(("priority", "timeout"), _NUMBER),
}
_INPUT_FIELDS: Checks = {"name": _TEXT, "datatype": _TEXT}
_MEMORY: Checks = {
    "shared_memory_region": (lambda _: False, "none: no memory is shared with clients; send data"),
}
_INPUT_PARAMETERS: Checks = {"binary_data_size": _NUMBER, **_MEMORY}
_OUTPUT_FIELDS: Checks = {"name": _TEXT}
_OUTPUT_PARAMETERS: Checks = {
    "binary_data": _FLAG,
    "classification": (lambda _: False, "none: no model here has classes"),
    **_MEMORY,
}


def length_of_json(header: str | None, size_bytes: int) -> int:
    """Return how much of the body of a request to `infer` is JSON; tensors follow.

    `header` is Inference-Header-Content-Length, without which all of it is. It is refused unless
    it is a length within the body of `size_bytes`.
    """
    if header is None:
        return size_bytes
    # Twenty digits are more than any size has; int() refuses some thousands.
    is_number = header.isascii() and header.isdigit() and len(header) <= _MOST_DIGITS
    if not is_number or int(header) > size_bytes:
        raise RejectedError(
            f"Inference-Header-Content-Length: {header[:_MOST_SHOWN]} is not a length within a "
            f"body of {size_bytes} bytes"
        )
    return int(header)


def check_form(request: dict[str, Any], size_bytes: int) -> None:
    """Check a request to `infer` but for the values of its tensors.

    The whole body has `size_bytes`.
    """
    check_fields("the request:", request, _REQUEST_FIELDS)
    _check_parameters("the request:", _entry(request, "parameters", dict), _REQUEST_PARAMETERS)
    _check_count("outputs", _entry(request, "outputs", list))
    for name, each in _tensors(request, "inputs", _INPUT_FIELDS, _INPUT_PARAMETERS):
        shape = _entry(each, "shape", list)
        if not all(type(size) is int for size in shape):
            raise RejectedError(f"the shape of input {name} is not a list of integers")
        _check_shape(name, shape, most=size_bytes)
        if each["datatype"] == "BYTES":
            check_texts(name, math.prod(shape))
    for _ in _tensors(request, "outputs", _OUTPUT_FIELDS, _OUTPUT_PARAMETERS):
        pass


def _tensors(
    request: dict[str, Any], key: str, fields: Checks, known: Checks
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the inputs or outputs with their names, as messages have them."""
    entries, kind = _entry(request, key, list), key.removesuffix("s")
    _check_count(key, entries)
    for each in entries:
        if not isinstance(each, dict):
            raise RejectedError(f"an {kind} is not an object of JSON")
        name = repr(each.get("name"))[:_MOST_SHOWN]
        required = ("name", "datatype", "shape") if kind == "input" else ("name",)
        if missing := [field for field in required if field not in each]:
            raise RejectedError(f"{kind} {name} has no {missing[0]}")
        check_fields(f"{kind} {name}:", each, fields)
        # null stands for none, as in the server
        parameters = {} if each.get("parameters") is None else _entry(each, "parameters", dict)
        _check_parameters(f"{kind} {name}:", parameters, known)
        yield name, each


def check_fields(of: str, values: Mapping[str, Any], checks: Checks) -> None:
    """Refuse a request of which a value that is given does not pass its check."""
    for name, (passes, expected) in checks.items():
        if name in values and not passes(values[name]):
            shown = json.dumps(values[name])[:_MOST_SHOWN]
            raise RejectedError(f"{of} {name} is {shown}; expected {expected}")


def _check_parameters(of: str, parameters: dict[str, Any], checks: Checks) -> None:
    _check_count("parameters", parameters)
    if any("\0" in key for key in parameters):
        raise RejectedError(f"{of} the name of a parameter has a null character")
    if own := next((key for key in parameters if key.startswith(OWN_PREFIX)), None):
        raise RejectedError(
            f"{of} parameter {own[:_MOST_SHOWN]}: {OWN_PREFIX} begins names of the server's owner"
        )
    check_fields(f"{of} parameter", parameters, checks)


def check_data(tensor: dict[str, Any]) -> None:
    """Check that the values of a tensor are as many as its shape says, and fit its type."""
    name, datatype, shape = repr(tensor["name"])[:_MOST_SHOWN], tensor["datatype"], tensor["shape"]
    values = list(leaves(_entry(tensor, "data", list)))
    if len(values) != math.prod(shape):
        raise RejectedError(
            f"input {name} has the shape {str(shape)[:100]}, {math.prod(shape)} elements, and "
            f"{len(values)} in its data"
        )
    if datatype in _KINDS or datatype in _FLOATS:
        _check_values(name, values, datatype)


def leaves(data: list[Any]) -> Iterator[Any]:
    """Yield the values in nested lists of a few levels, in order."""
    for value in data:
        if isinstance(value, list):
            yield from leaves(value)
        else:
            yield value


def check_index(data: bytes) -> None:
    """Check the body of a request for the list of models."""
    check_fields("the request:", parse_json(data), {"ready": _FLAG})


def check_generate(data: bytes, datatypes: Mapping[str, str]) -> None:
    """Check the JSON of a request to `generate`, whose inputs may stand among its parameters.

    It is refused if it has another form, or a value of another type than its input; `datatypes` are
    those of a model's inputs by name, in the spelling of requests: UINT32, BYTES.
    """
    request = parse_json(data)
    check_fields("the request:", request, _REQUEST_FIELDS)
    parameters = _entry(request, "parameters", dict)
    _check_count("inputs", request)
    for given in (request, parameters):
        _check_parameters("the request:", given, {})
    for name, row in (*request.items(), *parameters.items()):
        if name not in datatypes:
            continue
        shown, values = repr(name)[:_MOST_SHOWN], list(leaves([row]))
        if isinstance(row, list) and len(values) != len(row):
            raise RejectedError(
                f"input {shown} is a list of lists; generate takes one row as a flat list, infer "
                "several"
            )
        _check_values(shown, values, datatypes[name])


def _check_values(name: str, values: Collection[Any], datatype: str) -> None:
    kinds, expected = _KINDS.get(datatype, ((int, float), "a number"))
    least, most = _INTEGERS.get(datatype, (-math.inf, math.inf))
    for value in values:
        if type(value) not in kinds:
            text = json.dumps(value)[:_MOST_SHOWN]
            raise RejectedError(f"input {name} has {text}; {datatype} takes {expected}")
        if datatype in _INTEGERS and not least <= value <= most:
            text = str(value)[:_MOST_SHOWN]
            raise RejectedError(f"input {name} has {text}, which {datatype} cannot hold")


def _check_shape(name: str, shape: Sequence[int], *, most: int) -> None:
    """Check a shape against the number of elements that can have been sent."""
    if len(shape) > _MOST_DIMENSIONS:
        raise RejectedError(f"input {name} has {len(shape)} dimensions, {_MOST_DIMENSIONS} at most")
    text = str(list(shape))[:100]
    if any(size < 0 for size in shape) or (shape and shape[0] == 0):
        raise RejectedError(f"input {name} has the shape {text}; sizes are positive")
    # An empty tensor has sizes too, by which a reader may multiply or loop.
    if math.prod(size or 1 for size in shape) > most:
        raise RejectedError(f"input {name} has the shape {text}, and fewer elements were sent")


def check_texts(name: str, count: int) -> None:
    """Check the number of texts of an input."""
    if count > MOST_TEXTS:
        raise RejectedError(f"input {name} has {count} texts, {MOST_TEXTS} at most")


def _entry(of: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = of.get(key, kind())
    if not isinstance(value, kind):
        raise RejectedError(f"{key!r} is not {'a list' if kind is list else 'an object'} of JSON")
    return value


def _check_count(name: str, entries: Any) -> None:
    if len(entries) > MOST_ENTRIES:
        raise RejectedError(f"the request has {len(entries)} {name}, {MOST_ENTRIES} at most")
