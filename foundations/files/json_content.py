"""JSON from elsewhere: its contents, or a clear error."""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# An object of JSON or YAML, or a dictionary of a pickle; and one that is being built.
Table = Mapping[str, Any]
Fields = dict[str, Any]
RecordT = TypeVar("RecordT")


def json_object(
    content: bytes | str,
    source: object,
    *,
    remedy: str = "correct it, or copy it again",
    is_strict: bool = False,
) -> Fields:
    """Return the object that a JSON text holds.

    Args:
        content: The text; bytes are UTF-8, unless they begin like UTF-16 or UTF-32.
        source: The name of the text in messages, such as its path.
        remedy: What to do about a text that is not an object.
        is_strict: Refuse duplicate names.

    Raises:
        ValueError: The text is not an object.
    """
    try:
        value = json.loads(content, object_pairs_hook=_unique if is_strict else None)
        if isinstance(value, dict):
            return value
        reason = f"it is of type {type(value).__name__}"
    except RecursionError:
        reason = "it is nested too deep"
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""  # `source` may name a line
        reason = f"{error.msg} at {line}column {error.colno}"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{source} is not a JSON object: {reason}; {remedy}")


def json_bytes(table: Table) -> bytes:
    """Return the content of an indented JSON file."""
    return (json.dumps(table, indent=2, ensure_ascii=False) + "\n").encode()


def nested(value: Any, *keys: Any) -> Any:
    """Return the value at the keys of nested tables; None if one is missing or not a table."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_count(value: Any, least: int = 0) -> TypeGuard[int]:
    """Return whether a value of unknown form is a whole number of at least `least`."""
    return type(value) is int and value >= least


def without_nulls(table: Table) -> Fields:
    """Return the entries of a table whose value is not None."""
    return {name: value for name, value in table.items() if value is not None}


def dotted(table: Table, prefix: str = "") -> Fields:
    """Return the values of nested tables by their dotted names."""
    out: Fields = {}
    for name, value in table.items():
        inner = dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        out |= inner or {f"{prefix}{name}": value}
    return out


@cache
def adapter_of(kind: Any) -> "TypeAdapter[Any]":
    """Return pydantic's adapter of a type, built once."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def record_in(kind: type[RecordT], content: bytes | str) -> RecordT:
    """Return the record that a JSON text holds: a dataclass or another type.

    Keys unknown to the type, such as those of a later version, are ignored.

    Raises:
        ValueError: A required value is missing, or one has another form; the message begins with
            its dotted key.
    """
    from pydantic import ValidationError

    try:
        found: RecordT = adapter_of(cast("Any", kind)).validate_json(content, strict=True)
    except ValidationError as error:
        first, *_ = error.errors(include_url=False)
        place = ".".join(map(str, first["loc"])) or "the text"
        given = "" if first["type"] == "missing" else f", not {first['input']!r:.80}"
        raise ValueError(f"{place}: {first['msg']}{given}") from error
    return found


def _unique(pairs: list[tuple[str, Any]]) -> Fields:
    table = dict(pairs)
    if len(table) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"it names {counts.most_common(1)[0][0]!r:.100} twice")
    return table
