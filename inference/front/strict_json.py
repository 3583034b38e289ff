"""JSON of requests, restricted to what every parser reads alike."""

import math
from typing import Any

import jiter

from inference.front.guard import RejectedError

MAX_JSON_MB = 8
MAX_JSON_BYTES = MAX_JSON_MB << 20
_MAX_LEVELS = 32
_TOO_DEEP = f"the JSON of a request may have at most {_MAX_LEVELS} levels"


def parse_json(data: bytes) -> dict[str, Any]:
    """Return a JSON object that every parser reads alike. Raises RejectedError for any other."""
    if len(data) > MAX_JSON_BYTES:
        raise RejectedError(
            f"the JSON of a request may have {MAX_JSON_MB} MiB; send large tensors as binary data"
        )
    try:
        # Parsers disagree on which of two equal keys counts.
        value = jiter.from_json(
            data, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True
        )
    except ValueError as error:
        reason = str(error)[:200]
        is_deep = reason.startswith("recursion limit")
        raise RejectedError(_TOO_DEEP if is_deep else f"the body is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise RejectedError("the body is not an object of JSON")
    _check(value)
    return value


def _check(request: dict[str, Any]) -> None:
    """Check levels, numbers and keys; some parsers end a key at a null character."""
    containers: list[Any] = [request]
    for _ in range(_MAX_LEVELS):
        inner: list[Any] = []
        for container in containers:
            if isinstance(container, dict) and "\0" in "".join(container):
                raise RejectedError("in the body's JSON a key has a null character")
            items = container.values() if isinstance(container, dict) else container
            kinds = set(map(type, items))
            if float in kinds and (math.inf in items or -math.inf in items):
                raise RejectedError("in the body's JSON a number is out of range")
            if not kinds.isdisjoint((dict, list)):
                inner += [item for item in items if isinstance(item, dict | list)]
        containers = inner
    if containers:
        raise RejectedError(_TOO_DEEP)
