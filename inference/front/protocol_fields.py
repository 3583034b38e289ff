"""The types of what a request to `infer` holds next to its data: ids, names and parameters.

Server 2.51 answers a wrong one with a status of its own failures, and reads a text up to a null
character, which would give one request two meanings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from inference.supervision import CANARY_PARAMETER

MOST_SEQUENCE_ID_BYTES = 128  # of one that is a text
_MOST_NUMBER = (1 << 64) - 1
Check = tuple[Callable[[Any], bool], str]  # whether a value passes, and what is expected


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER


def _is_sequence_text(value: Any) -> bool:
    return _is_text(value) and len(value.encode()) <= MOST_SEQUENCE_ID_BYTES


_SEQUENCE_TEXT = f"a text of up to {MOST_SEQUENCE_ID_BYTES} bytes without a null character"
_TEXT: Check = (_is_text, "a text without a null character")
_NUMBER: Check = (_is_number, f"a whole number from 0 to {_MOST_NUMBER}")
_FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
_MEMORY: Mapping[str, Check] = {
    "shared_memory_region": _TEXT,
    "shared_memory_offset": _NUMBER,
    "shared_memory_byte_size": _NUMBER,
}
# A model answers its owner's canaries out of turn, and does not count them.
OWN_PARAMETERS: Mapping[str, Check] = {
    CANARY_PARAMETER: (lambda _: False, "none, which is for the server's owner"),
}
REQUEST_FIELDS: Mapping[str, Check] = {"id": _TEXT}
MODEL_FIELDS: Mapping[str, Check] = dict.fromkeys(("model_name", "model_version"), _TEXT)  # gRPC
INDEX_FIELDS: Mapping[str, Check] = {"ready": _FLAG}
REQUEST_PARAMETERS: Mapping[str, Check] = {
    "sequence_id": (
        lambda value: _is_number(value) or _is_sequence_text(value),
        f"{_SEQUENCE_TEXT}, or {_NUMBER[1]}",
    ),
    **dict.fromkeys(("sequence_start", "sequence_end", "binary_data_output"), _FLAG),
    **dict.fromkeys(("priority", "timeout"), _NUMBER),
    **OWN_PARAMETERS,
}
INPUT_FIELDS: Mapping[str, Check] = {"name": _TEXT, "datatype": _TEXT}
INPUT_PARAMETERS: Mapping[str, Check] = {"binary_data_size": _NUMBER, **_MEMORY}
OUTPUT_FIELDS: Mapping[str, Check] = {"name": _TEXT}
OUTPUT_PARAMETERS: Mapping[str, Check] = {"binary_data": _FLAG, **_MEMORY}


def field_problem(values: Mapping[str, Any], checks: Mapping[str, Check]) -> str | None:
    """Return what is wrong with the first wrong value, None if all that are given are right."""
    for name, (passes, expected) in checks.items():
        if name in values and not passes(values[name]):
            return f"{name} is {json.dumps(values[name])[:40]}; expected {expected}"
    return None
