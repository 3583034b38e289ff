"""JSON of requests that every parser reads alike."""

import json
import math
from typing import Any, NoReturn

from inference.front.guard import RejectedError

MOST_JSON_MB = 8
MOST_JSON_BYTES = MOST_JSON_MB << 20
_MOST_LEVELS = 32


def parse_json(data: bytes) -> dict[str, Any]:
    """Return an object of JSON that every parser reads alike, not too large and not too deep."""
    if len(data) > MOST_JSON_BYTES:
        raise RejectedError(
            f"the JSON of a request may have {MOST_JSON_MB} MiB; send large tensors as binary data"
        )
    too_deep = RejectedError(f"the JSON has more than {_MOST_LEVELS} levels")
    try:
        value = _decode(data.decode())
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        reason = str(error).partition("; use ")[0]  # which is for programmers of Python
        raise RejectedError(f"the body is not JSON: {reason[:200]}") from None
    if not isinstance(value, dict):
        raise RejectedError("the body is not an object of JSON")
    # Few brackets can make no more levels, and a text may hold some.
    is_deep = data.count(b"[") + data.count(b"{") > _MOST_LEVELS
    containers, levels = list[Any]([value] if is_deep else ()), 0
    while containers:
        if (levels := levels + 1) > _MOST_LEVELS:
            raise too_deep
        containers = [
            inner
            for outer in containers
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if b"\\u" in data:
        _check_surrogates(value)
    return value


def _check_surrogates(request: dict[str, Any]) -> None:
    """Check that no text has half of a character that UTF-16 writes as two."""
    key = ""
    try:
        for key, value in request.items():
            json.dumps([key, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name = json.dumps(key)[:100]
        raise RejectedError(f"{name} has half of a surrogate pair") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")  # parsers differ in which one counts
    if "\0" in "".join(made):
        raise ValueError("a key has a null character")  # at which some parsers end it
    return made


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:40]} is out of range")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


_decode = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse
).decode
