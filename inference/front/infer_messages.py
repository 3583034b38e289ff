"""Check a ModelInferRequest of gRPC: what is not data has the form that it has in JSON."""

from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from export_scripts.wire_format import WireField, WireFormatError, wire_fields
from inference.front import validation
from inference.front.guard import RejectedError
from inference.front.strict_json import MOST_JSON_BYTES, MOST_JSON_MB

_MOST_FIELDS = 4 * validation.MOST_ENTRIES + 16
_RAW_INPUT_CONTENTS = 7  # of service_pb2.ModelInferRequest


def parsed(kind: Any, data: bytes) -> Any:
    """Return a message of gRPC. Raises RejectedError if the bytes are not one of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise RejectedError(f"the message is not a {kind.DESCRIPTOR.name}") from None


def without_raw_tensors(data: bytes) -> tuple[bytes, list[WireField]]:
    """Return a ModelInferRequest of gRPC without its raw tensors, and the fields of these.

    No field is parsed: two bytes of a message can take a hundred bytes of memory. One with more
    fields, or more bytes outside of raw tensors, than a request needs is refused.
    """
    kept, raw = bytearray(), list[WireField]()
    try:
        for count, field in enumerate(wire_fields(data), start=1):
            if count > _MOST_FIELDS:
                raise RejectedError(f"the request has more than {_MOST_FIELDS} fields")
            if field.number == _RAW_INPUT_CONTENTS and field.content is not None:
                raw.append(field)
            else:
                kept += data[field.place]
            if len(kept) > MOST_JSON_BYTES:
                raise RejectedError(
                    f"a request may have {MOST_JSON_MB} MiB outside of raw_input_contents; send "
                    "large tensors there"
                )
    except WireFormatError:
        raise RejectedError("the message is not a ModelInferRequest") from None
    return bytes(kept), raw


def message_fields(data: bytes) -> tuple[Any, dict[str, Any]]:
    """Return a ModelInferRequest `without_raw_tensors`, and its fields in the form of JSON.

    Raises RejectedError.
    """
    message = parsed(service_pb2.ModelInferRequest, data)
    fields = {key: getattr(message, key) for key in validation.MODEL_FIELDS}
    validation.check_fields("the request:", fields, validation.MODEL_FIELDS)
    for each in message.inputs:
        validation.check_texts(repr(each.name)[:40], len(each.contents.bytes_contents))
    return message, {
        "id": message.id,
        "parameters": _parameters(message),
        "inputs": [
            {**_tensor(each), "datatype": each.datatype, "shape": list(each.shape)}
            for each in message.inputs
        ],
        "outputs": [_tensor(each) for each in message.outputs],
    }


def _tensor(message: Any) -> dict[str, Any]:
    return {"name": message.name, "parameters": _parameters(message)}


def _parameters(message: Any) -> dict[str, Any]:
    found = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, kind) if kind else None
        # The server reads a negative number as the one of 64 bits with the same digits.
        if type(value) is int and name in validation.WHOLE_NUMBERS:
            value %= 1 << 64
        found[name] = value
    return found
