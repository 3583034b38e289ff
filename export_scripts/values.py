"""One key of the configuration: its meaning, its range, and what is wrong with a value of it."""

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from export_scripts.suggest import did_you_mean

MISSING: Any = "???"  # OmegaConf's value of a key without one

# The longest name of a file, and the longest path, that Linux takes.
_PART_BYTES, _PATH_BYTES = 255, 4096
# Names of models and jobs become parts of file names, with words before and after them.
NAME_BYTES = 128
# Bounds beyond which a number can only be a typing error.
NODE_CPUS, NODE_MEMORY_GB, NODE_GPUS = 4096, 65536, 64
TOKENS, SECONDS, PORT = 1 << 20, 30 * 24 * 3600, 65535
INT32 = (1 << 31) - 1  # numbers of config.pbtxt
_NAME = re.compile(r"[\w.-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Types of fields, and of their keys.
_KEY_TYPES: dict[Any, Any] = {Path: str, Path | None: str | None}
_KEY_TYPES |= dict.fromkeys((tuple[Path, ...], tuple[str, ...]), list[str])
_Record = typing.TypeVar("_Record")
_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    Any: "a value",
}


def option(
    text: str,
    default: Any = MISSING,
    *,
    choices: tuple[Any, ...] = (),
    within: tuple[float, float] | None = None,
    path: bool = False,
    name: bool = False,
    lines: bool = False,
    ignored: bool = False,
) -> Any:
    """Return a dataclass field with the facts of `Key` about it."""
    metadata = {
        "text": text,
        "choices": choices,
        "within": within,
        "is_path": path,
        "is_name": name,
        "has_lines": lines,
        "is_ignored": ignored,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Key:
    """One key of the configuration."""

    name: str  # dotted name
    type: Any  # its Python type
    text: str  # its meaning, for `--help` and messages
    choices: tuple[Any, ...]  # every value that it takes; empty for any
    # Smallest and largest value of a number, or of each number of a list.
    within: tuple[float, float] | None
    is_path: bool  # names a file or folder, and is made absolute
    is_name: bool  # becomes part of names of files and jobs
    has_lines: bool  # a text that may have several lines
    is_ignored: bool  # accepted for compatibility, without effect
    default: Any  # value where no file and no override gives one

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that a value may have, of which None is one where null is allowed."""
        is_union = isinstance(self.type, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def is_list(self) -> bool:
        """Return whether the value is a list."""
        return typing.get_origin(self.type) is list

    def expected(self) -> str:
        """Return what a value has to be, in words."""
        if self.choices:
            return "one of " + ", ".join(dict.fromkeys(map(shown, self.choices)))
        words = []
        for each in self.types:
            origin = typing.get_origin(each)
            if origin is list:
                (entry,) = typing.get_args(each)
                span = f" with each entry {_TYPE_WORDS[entry]}{self._range()}"
                words.append("a list such as [a,b]" + (span if entry is int else ""))
            elif origin is dict:
                words.append("a mapping such as {a: 1}")
            else:
                words.append(_TYPE_WORDS[each] + (self._range() if each in (int, float) else ""))
        return " or ".join(words)

    def converted(self, value: Any) -> Any:
        """Return a value in the key's type; what `problem` names stays as it is.

        Raises:
            ValueError: it has another type.
        """
        if bool in self.types or (value is None and {type(None), Any} & {*self.types}):
            return value
        (kind,) = (each for each in self.types if each is not type(None))
        origin = typing.get_origin(kind)
        if origin is None:
            return _scalar(kind, value)
        if not isinstance(value, origin):
            raise ValueError(value)
        if origin is dict:
            kind = typing.get_args(kind)[1]
            return {str(name): _scalar(kind, each) for name, each in value.items()}
        (kind,) = typing.get_args(kind)
        nested = (list, dict)
        return [each if isinstance(each, nested) else _scalar(kind, each) for each in value]

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with a value that has the right type, as `<key>=<value>: ...`."""
        if value is None:
            return None if type(None) in self.types or Any in self.types else self.refusal(value)
        if bool in self.types and not isinstance(value, bool):
            return self.refusal(value)
        if self.choices and not any(value == each for each in self.choices):
            hint = did_you_mean(str(value), map(shown, self.choices))
            return self.refusal(value, hint=hint)
        values = list(value) if self.is_list else [value]
        return next((found for each in values if (found := self._entry_problem(each, value))), None)

    def _entry_problem(self, entry: Any, value: Any) -> str | None:
        """Return what is wrong with a value, or with an entry of a list."""
        if self.is_list and hasattr(entry, "__iter__") and not isinstance(entry, str):
            return (
                f"{self.name}={value}: expected a list of single values such as [a,b] "
                f"({self.text})."
            )
        is_number = isinstance(entry, (int, float)) and not isinstance(entry, bool)
        if self.within is not None and is_number:
            low, high = self.within
            return None if low <= entry <= high else self.refusal(value)
        if isinstance(entry, str):
            return self._text_problem(entry)
        return None

    def _text_problem(self, text: str) -> str | None:
        is_odd = _CONTROL.search(text)
        key = f"{self.name}={shortened(text)!r}" if is_odd else f"{self.name}={shortened(text)}"
        if self.is_path and not text:
            return (
                f"{self.name}= is empty ({self.text}); give a path (was a variable of the shell "
                "not set?)."
            )
        if is_odd and not self.has_lines:
            return f"{key}: line breaks and control characters are not allowed here ({self.text})."
        if self.is_name and (found := name_problem(text)):
            return f"{key} {found} ({self.text})."
        names = text.split("/") if self.is_path else []
        if any(len(name.encode(errors="replace")) > _PART_BYTES for name in names):
            return (
                f"{key}: a name in it is longer than {_PART_BYTES} bytes; shorten it ({self.text})."
            )
        if len(text.encode(errors="replace")) > _PATH_BYTES and not self.has_lines:
            return f"{key}: longer than {_PATH_BYTES} bytes ({self.text}); give a shorter one."
        return None

    def refusal(self, value: Any, *, hint: str = "") -> str:
        """Return that a value is not what the key expects."""
        return (
            f"{self.name}={shortened(shown(value))}{hint}: expected {self.expected()} "
            f"({self.text})."
        )

    def _range(self) -> str:
        if self.within is None:
            return ""
        # Without an exponent.
        low, high = (f"{n:.0f}" if float(n).is_integer() else f"{n:g}" for n in self.within)
        return f" from {low} to {high}"


def _scalar(kind: Any, value: Any) -> Any:
    """Return a single value as text, a number or as it is. Raises ValueError."""
    if kind is Any:
        return value
    if isinstance(value, (list, dict, type(None))):
        raise ValueError(value)
    if kind in (int, float) and (isinstance(value, bool) or (kind, type(value)) == (int, float)):
        raise ValueError(value)
    return kind(value)


def built(root: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Return a dataclass with nested ones from nested mappings of all its fields."""
    hints = typing.get_type_hints(root)

    def made(kind: Any, value: Any) -> Any:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return built(kind, value)
        if typing.get_origin(kind) is tuple:
            return tuple(map(typing.get_args(kind)[0], value))
        return Path(value) if value is not None and kind in _KEY_TYPES else value

    return root(**{name: made(hints[name], value) for name, value in values.items()})


def keys_of(root: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(root)
    for each in dataclasses.fields(root):
        name = f"{prefix}{each.name}"
        kind = _KEY_TYPES.get(hints[each.name], hints[each.name])
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from keys_of(kind, f"{name}.")
            continue
        made = each.default_factory
        default = each.default if made is dataclasses.MISSING else made()
        yield Key(name, kind, default=[*default] if default == () else default, **each.metadata)


def name_problem(text: str) -> str | None:
    """Return why a text cannot be part of the names of files and jobs."""
    rule = "use letters, digits and . _ -"
    if not text:
        return f"is empty; {rule}"
    if not _NAME.fullmatch(text) or text in (".", "..") or text.startswith("-"):
        return f"cannot be part of names of files and jobs; {rule}"
    if (size := len(text.encode())) > NAME_BYTES:
        return f"has {size} bytes, and a name at most {NAME_BYTES}; shorten it"
    return None


def shown(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def shortened(text: str) -> str:
    """Return a text with its middle left out where it is long."""
    return text if len(text) <= 120 else f"{text[:60]}...{text[-20:]}"


def amount(value: float) -> str:
    """Return a number with three digits and a decimal unit."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
