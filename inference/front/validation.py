"""The schema of KServe's requests, with a limit on every count and size.

Pydantic checks HTTP's JSON and gRPC's messages alike. No shape may be larger than the data that
came with it. A refusal names the field, its value and what was expected.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from ml_dtypes import bfloat16
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from inference.front.guard import RejectedError
from inference.front.strict_json import parse_json
from inference.system.supervision import OWN_PREFIX

MAX_ENTRIES = 256  # inputs, outputs or parameters of a request
_MAX_DIMENSIONS = 16
# Texts in one tensor: an empty text takes four bytes here and some hundred in a model.
MAX_TEXTS = 1 << 16
MAX_SEQUENCE_ID_BYTES = 128  # of a text; ids may also be numbers
_MAX_DIGITS = 20
_MAX_SHOWN = 40  # characters of a value in an error
_MAX_REASONS = 4
_FORWARDED = frozenset({"priority", "timeout"})  # protocol parameters that models also get
_UINT64, _INT64 = (1 << 64) - 1, (1 << 63) - 1
# numpy's type for each of KServe's.
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{sign}INT{bits}": np.dtype(f"{sign}int{bits}".lower())
       for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    "BF16": np.dtype(bfloat16),
    "BYTES": np.dtype(np.object_),
}  # fmt: skip
_Record_ = TypeVar("_Record_", bound="_Record")


def _values(element: Any, **bounds: int) -> TypeAdapter[list[Any]]:
    one = Annotated[element, Field(**bounds)]
    row = Annotated[list[one], Field(fail_fast=True)]
    return TypeAdapter(row, config=ConfigDict(strict=True))


# Validators of the types that may be sent as JSON, or as typed contents of a gRPC message.
_VALUES = {
    "BOOL": _values(bool),
    "BYTES": _values(str | bytes),
    "FP32": _values(float),
    "FP64": _values(float),
    **{name: _values(int, ge=int(np.iinfo(kind).min), le=int(np.iinfo(kind).max))
       for name, kind in DATATYPES.items() if "INT" in name},
}  # fmt: skip


def _one_line(text: str) -> str:
    if "\0" in text:
        raise ValueError("should have no null character")
    return text


def _datatype(name: str) -> str:
    if name not in DATATYPES:
        raise ValueError(f"invalid datatype {name[:_MAX_SHOWN]}; known are {', '.join(DATATYPES)}")
    return name


def _sequence_id(value: Any) -> Any:
    is_number = type(value) is int and 0 <= value <= _UINT64
    is_text = isinstance(value, str) and "\0" not in value
    if is_number or (is_text and len(value.encode()) <= MAX_SEQUENCE_ID_BYTES):
        return value
    raise ValueError(
        f"should be a text of up to {MAX_SEQUENCE_ID_BYTES} bytes without a null character, or a "
        f"whole number from 0 to {_UINT64}, and is {_shown(value)}"
    )


def _nothing(_: Any) -> Any:
    raise ValueError("is not taken: no memory is shared with clients, and no model has classes")


_Text = Annotated[str, AfterValidator(_one_line)]
_Whole = Annotated[int, Field(ge=0, le=_INT64)]
_Refused = Annotated[None, BeforeValidator(_nothing)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _Parameters(_Record):
    """Parameters by name: the protocol's, and any others, each a single value."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, parameters: Any) -> Any:
        """Check names and values; null means no parameters."""
        if not isinstance(parameters, dict):
            return {} if parameters is None else parameters
        if parameters.keys() <= cls.__pydantic_fields__.keys():
            return parameters
        if len(parameters) > MAX_ENTRIES:
            raise ValueError(f"{len(parameters)} parameters, {MAX_ENTRIES} at most")
        for name, value in parameters.items():
            shown = name[:_MAX_SHOWN]
            if "\0" in name:
                raise ValueError("the name of a parameter has a null character")
            if name.startswith(OWN_PREFIX):
                raise ValueError(f"parameter {shown}: {OWN_PREFIX} begins names of the owner's own")
            if name in cls.__pydantic_fields__:
                continue
            if not isinstance(value, bool | int | float | str):
                raise ValueError(
                    f"parameter {shown} is {_shown(value)}; expected a text, a number, true or "
                    "false"
                )
            if isinstance(value, int) and not -_INT64 - 1 <= value <= _INT64:
                raise ValueError(
                    f"parameter {shown} is {_shown(value)}; a number is within {-_INT64 - 1} and "
                    f"{_INT64}"
                )
        return parameters


class RequestParameters(_Parameters):
    """The parameters of a request."""

    sequence_id: Annotated[Any, AfterValidator(_sequence_id)] = 0
    sequence_start: bool = False
    sequence_end: bool = False
    binary_data_output: bool = False
    triton_enable_empty_final_response: bool = False
    priority: _Whole = 0
    timeout: _Whole = 0

    def others(self) -> dict[str, Any]:
        """Return the parameters to forward to the model."""
        forwarded = {name: getattr(self, name) for name in _FORWARDED & self.model_fields_set}
        return forwarded | (self.model_extra or {})


class _InputParameters(_Parameters):
    binary_data_size: _Whole | None = None
    shared_memory_region: _Refused = None


class _OutputParameters(_Parameters):
    binary_data: bool = False
    classification: _Refused = None
    shared_memory_region: _Refused = None


# Shared by all requests without parameters, which most are.
_PLAIN, _PLAIN_INPUT, _PLAIN_OUTPUT = RequestParameters(), _InputParameters(), _OutputParameters()


class SentTensor(_Record):
    """An input: its values, or the description of bytes that follow the JSON.

    Attributes:
        data: values in nested lists; after validation an array of `shape`.
    """

    name: _Text
    datatype: Annotated[str, AfterValidator(_datatype)]
    shape: Annotated[
        list[Annotated[int, Field(ge=0, le=_INT64)]], Field(max_length=_MAX_DIMENSIONS)
    ]
    parameters: _InputParameters = Field(default_factory=lambda: _PLAIN_INPUT)
    data: Any = None

    @model_validator(mode="after")
    def _check_sizes(self, info: ValidationInfo) -> SentTensor:
        """Check sizes against the number of bytes that were sent."""
        count, about = math.prod(self.shape), f"input {self.name[:_MAX_SHOWN]!r}"
        shape = str(self.shape)[:100]
        if self.shape[:1] == [0]:
            raise ValueError(f"{about} has the shape {shape}; sizes are positive")
        # An empty tensor's other sizes count too: a reader may multiply or loop by them.
        if math.prod(size or 1 for size in self.shape) > (info.context or 0):
            raise ValueError(f"{about} has the shape {shape}, and fewer elements were sent")
        if self.datatype == "BYTES" and count > MAX_TEXTS:
            raise ValueError(f"{about} has {count} texts, {MAX_TEXTS} at most")
        if self.data is not None:
            if self.parameters.binary_data_size is not None:
                raise ValueError(f"{about} has data and binary_data_size; send one of them")
            values = _leaves(self.data) if isinstance(self.data, list) else []
            if len(values) != count:
                raise ValueError(
                    f"{about} has the shape {shape}, {count} elements, and {len(values)} in its "
                    "data"
                )
            self.data = array_of_values(values, self.datatype, about).reshape(self.shape)
            self.data.setflags(write=False)  # requests may share it, see read_head
        return self


class _Output(_Record):
    name: _Text
    parameters: _OutputParameters = Field(default_factory=lambda: _PLAIN_OUTPUT)


class SentRequest(_Record):
    """A request to `infer` without the bytes that follow it. Only gRPC fills in the model."""

    model_name: _Text = ""
    model_version: _Text = ""
    id: _Text = ""
    parameters: RequestParameters = Field(default_factory=lambda: _PLAIN)
    # default_factory is cheaper than pydantic's copy of a default.
    inputs: list[SentTensor] = Field(max_length=MAX_ENTRIES, default_factory=list)
    outputs: list[_Output] = Field(max_length=MAX_ENTRIES, default_factory=list)
    # The model whose signature this request matches; not a field that clients send.
    matched_model: ClassVar[object] = None

    def set_matched(self, model: object) -> None:
        """Remember that the inputs match a model's signature, for repeats (see `read_head`)."""
        self.__dict__["matched_model"] = model

    def wants_bytes(self, output: str) -> bool:
        """Return whether the client wants an output as bytes."""
        for wanted in self.outputs:
            if wanted.name == output and "binary_data" in wanted.parameters.model_fields_set:
                return wanted.parameters.binary_data
        return self.parameters.binary_data_output


class GenerateRequest(_Record):
    """A request to `generate`: inputs by name, also inside `parameters`."""

    model_config = ConfigDict(extra="allow")

    id: _Text = ""
    parameters: RequestParameters = Field(default_factory=lambda: _PLAIN)


class IndexRequest(_Record):
    """A request for the list of models."""

    ready: bool = False


def checked_form(kind: type[_Record_], fields: Mapping[str, Any], size_bytes: int = 0) -> _Record_:
    """Return a validated request of `size_bytes` in all. Raises RejectedError."""
    try:
        return kind.model_validate(fields, context=size_bytes)
    except ValidationError as error:
        found = error.errors(include_url=False)
    reasons = [_words(problem) for problem in found[:_MAX_REASONS]]
    if len(found) > _MAX_REASONS:
        reasons.append(f"{len(found) - _MAX_REASONS} more")
    raise RejectedError("; ".join(reasons))


def _words(error: Any) -> str:
    place = "".join(f"[{e}]" if isinstance(e, int) else f".{e}" for e in error["loc"]).lstrip(".")
    where = f"{place}: " if place else ""
    if error["type"] == "missing":
        return f"{place} is missing"
    if error["type"] == "value_error":
        return where + str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "too_long":
        facts = error["ctx"]
        return f"{facts['actual_length']} {place}, {facts['max_length']} at most"
    words = str(error["msg"]).replace("Input should", "should").partition(" or instance")[0]
    return f"{where}{words}, and is {_shown(error['input'])}"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:_MAX_SHOWN]


def array_of_values(values: Sequence[Any], datatype: str, about: str) -> np.ndarray[Any, Any]:
    """Return JSON values as an array of shape (N,). Raises ValueError."""
    if datatype not in _VALUES:
        raise ValueError(f"{about} has the type {datatype}, which is sent as binary data alone")
    try:
        checked = _VALUES[datatype].validate_python(values)
    except ValidationError as error:
        (wrong,) = error.errors(include_url=False)[:1]
        words = str(wrong["msg"]).removeprefix("Input ")
        raise ValueError(f"{about} has {_shown(wrong['input'])}; {datatype} {words}") from None
    if datatype != "BYTES":
        return np.array(checked, DATATYPES[datatype])
    texts = np.empty(len(checked), np.object_)
    texts[:] = [value.encode() if isinstance(value, str) else value for value in checked]
    return texts


def _leaves(data: list[Any]) -> list[Any]:
    """Return the values of nested lists, in order."""
    while list in set(map(type, data)):
        data = [*chain.from_iterable(e if isinstance(e, list) else (e,) for e in data)]
    return data


def read_infer(data: bytes, size_bytes: int) -> SentRequest:
    """Return the request in the JSON of a request to `infer`. Raises RejectedError.

    `size_bytes` is the size of the whole body.
    """
    return checked_form(SentRequest, parse_json(data), size_bytes)


# The JSON before binary tensors holds no values: it is small, and clients repeat it.
MAX_HEAD_BYTES = 4 << 10
read_head = functools.lru_cache(maxsize=256)(read_infer)


def read_generate(data: bytes, inputs: Mapping[str, tuple[str, Sequence[int]]]) -> SentRequest:
    """Return the request in the JSON of a request to `generate`. Raises RejectedError.

    `inputs` are the types and shapes of a model's inputs by name. A flat list fills the last axis
    of variable size (-1). Every other key is a parameter.
    """
    fields = parse_json(data)
    if len(fields) > MAX_ENTRIES:
        raise RejectedError(f"the request has {len(fields)} inputs, {MAX_ENTRIES} at most")
    about = {"id": fields.pop("id")} if "id" in fields else {}
    inner = fields.pop("parameters", None) or {}
    if not isinstance(inner, dict):
        raise RejectedError("parameters should be an object of JSON")
    if twice := sorted(fields.keys() & inner.keys()):
        raise RejectedError(f"{twice[0][:_MAX_SHOWN]} is given twice, once in parameters")
    values = {**fields, **inner}
    rows = [_row(name, values.pop(name), *inputs[name]) for name in inputs if name in values]
    return checked_form(SentRequest, {**about, "parameters": values, "inputs": rows}, len(data))


def _row(name: str, value: Any, datatype: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return the tensor for one value or a flat list, in the fields of `SentTensor`."""
    row = value if isinstance(value, list) else [value]
    if any(isinstance(element, list) for element in row):
        raise RejectedError(
            f"input {name[:_MAX_SHOWN]!r} is a list of lists; generate takes one row as a flat "
            "list, infer several"
        )
    sizes = [max(size, 1) for size in shape]
    if -1 in shape:
        last = max(axis for axis, size in enumerate(shape) if size == -1)
        sizes[last] = len(row) // math.prod(sizes)
    return {"name": name, "datatype": datatype, "shape": sizes, "data": row}


def check_index(data: bytes) -> None:
    """Check the body of a request for the list of models. Raises RejectedError."""
    checked_form(IndexRequest, parse_json(data))


def length_of_json(header: str | None, size_bytes: int) -> int:
    """Return the length of the JSON in the body of a request to `infer`; tensors follow it.

    `header` is Inference-Header-Content-Length; without it the whole body is JSON. Raises
    RejectedError unless it is a length within the body of `size_bytes`.
    """
    if header is None:
        return size_bytes
    # No size has more than 20 digits; int() itself refuses thousands.
    is_number = header.isascii() and header.isdigit() and len(header) <= _MAX_DIGITS
    if not is_number or int(header) > size_bytes:
        raise RejectedError(
            f"Inference-Header-Content-Length: {header[:_MAX_SHOWN]} is not a length within a "
            f"body of {size_bytes} bytes"
        )
    return int(header)
