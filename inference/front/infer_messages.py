"""gRPC's ModelInferRequest, brought into the form of a JSON request."""

import functools
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from inference.front.guard import RejectedError
from inference.front.strict_json import MAX_JSON_BYTES, MAX_JSON_MB
from inference.front.validation import MAX_ENTRIES, MAX_TEXTS, SentRequest, checked_form
from inference.front.wire_format import wire_fields

_MAX_FIELDS = 4 * MAX_ENTRIES + 16
_ID, _RAW_INPUT_CONTENTS = 3, 7  # of service_pb2.ModelInferRequest


def parsed(kind: Any, data: bytes) -> Any:
    """Return a gRPC message. Raises RejectedError if the bytes are not a message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RejectedError(f"the message is not a {kind.DESCRIPTOR.name}") from None


def without_raw_tensors(data: bytes) -> tuple[bytes, list[slice]]:
    """Return a ModelInferRequest without its raw tensors, and the positions of these in `data`.

    Parses no field: two bytes of a message can take a hundred bytes of memory. Raises RejectedError
    for more fields, or more bytes outside of raw tensors, than a request needs.
    """
    rest, raw = bytearray(), list[slice]()
    try:
        for count, (number, place, content) in enumerate(wire_fields(data), start=1):
            if count > _MAX_FIELDS:
                raise RejectedError(f"the request has more than {_MAX_FIELDS} fields")
            if number == _RAW_INPUT_CONTENTS and content is not None:
                raw.append(content)
            else:
                rest += data[place]
            if len(rest) > MAX_JSON_BYTES:
                raise RejectedError(
                    f"a request may have {MAX_JSON_MB} MiB outside of raw_input_contents; send "
                    "large tensors there"
                )
    except ValueError:
        raise RejectedError("the message is not a ModelInferRequest") from None
    return bytes(rest), raw


def message_id(data: bytes) -> str:
    """Return the id of a refused ModelInferRequest, "" if it has none."""
    try:
        found = [content for number, _, content in wire_fields(data) if number == _ID]
    except ValueError:
        return ""
    return data[found[-1]].decode(errors="replace") if found and found[-1] else ""


def read_message(data: bytes, size_bytes: int) -> SentRequest:
    """Return the request in a ModelInferRequest `without_raw_tensors`. Raises RejectedError.

    `size_bytes` is the size of the whole message.
    """
    message = parsed(service_pb2.ModelInferRequest, data)
    fields = {key: getattr(message, key) for key in ("model_name", "model_version", "id")}
    fields["parameters"] = _parameters(message)
    fields["inputs"] = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
            "parameters": _parameters(tensor),
            "data": _contents(tensor),
        }
        for tensor in message.inputs
    ]
    fields["outputs"] = [
        {"name": output.name, "parameters": {"binary_data": True, **_parameters(output)}}
        for output in message.outputs
    ]
    return checked_form(SentRequest, fields, size_bytes)


read_message_head = functools.lru_cache(maxsize=256)(read_message)  # see validation.read_head


def _contents(tensor: Any) -> list[Any] | None:
    """Return the typed contents of a tensor, None if its values are raw."""
    fields = tensor.contents.ListFields()
    if len(fields) > 1:
        names = " and ".join(field.name for field, _ in fields)
        raise RejectedError(f"input '{tensor.name[:40]}' has {names}; send one of them")
    for _, values in fields:
        return list(values[: MAX_TEXTS + 1]) if tensor.datatype == "BYTES" else list(values)
    return None


def _parameters(message: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        # gRPC's parameters are signed: a negative id stands for the unsigned one of the same bits.
        if type(value) is int and name == "sequence_id":
            value %= 1 << 64
        found[name] = value
    return found
