"""Keys of the configuration: their meaning, their ranges, and the checks of their values.

pydantic checks types, ranges and structure; the rules for strings and paths are here.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundations.files.json_content import Fields, Table, adapter_of
from foundations.suggest import did_you_mean

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema, ErrorDetails

MISSING: Any = "???"  # OmegaConf's mark of a key without a value

# Linux's limits of a file name and of a path.
_PART_BYTES, _PATH_BYTES = 255, 4096
# Names of models and jobs become parts of file names, with prefixes and suffixes.
NAME_BYTES = 128
# A number beyond these can only be a typing error.
NODE_CPUS, NODE_MEMORY_GB, NODE_GPUS = 4096, 65536, 64
TOKENS, SECONDS, PORT = 1 << 20, 30 * 24 * 3600, 65535
INT32 = (1 << 31) - 1  # the largest integer in config.pbtxt
_NAME = re.compile(r"[\w.-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# pydantic's type of error -> the wording here.
_EXPECTED = {
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "dict_type": "expected a mapping such as {a: 1}",
    "path_type": "expected a path; write ./ before a name of digits",
    "string_type": "expected a text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "list_type": "expected a list such as [a,b]",
    "tuple_type": "expected a list such as [a,b]",
}
_Record = typing.TypeVar("_Record")


class WrongValuesError(ValueError):
    """Values of a record are wrong.

    Attributes:
        problems: key -> a sentence about its wrong value.
    """

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("\n".join(problems.values()))
        self.problems = problems


@dataclass(frozen=True)
class Within:
    """The range of each number in a list, as in `list[Annotated[int, Within(1, 8)]]`.

    pydantic calls it; a module that only declares options need not import pydantic.
    """

    low: float
    high: float

    def __get_pydantic_core_schema__(
        self, kind: Any, handler: "GetCoreSchemaHandler"
    ) -> "CoreSchema":
        return {**handler(kind), "ge": self.low, "le": self.high}


def option(
    text: str, default: Any = MISSING, *, within: tuple[float, float] | None = None, **facts: Any
) -> Any:
    """Return a dataclass field with attributes of `Key`; pydantic reads `ge` and `le`."""
    metadata = {"text": text, **facts}
    if within is not None:
        metadata |= dict(zip(("ge", "le"), within, strict=True))
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the configuration."""

    name: str  # dotted name
    type: Any  # its Python type
    text: str  # its meaning, for `--help` and messages
    default: Any  # its value if no file and no override sets one
    choices: tuple[Any, ...] = ()  # the allowed values; empty: any
    is_path: bool = False  # names files or folders; made absolute
    is_name: bool = False  # becomes part of names of files and jobs
    has_lines: bool = False  # the text may have several lines
    form: tuple[str, str] | None = None  # pattern of a value or list entry; how to write one
    check: Callable[[Any], object] | None = None  # raises ValueError with the reason
    ge: float | None = None  # smallest value of a number
    le: float | None = None  # largest value of a number

    @property
    def is_list(self) -> bool:
        """Return whether the value is a list."""
        return typing.get_origin(self.type) in (list, tuple)

    @property
    def kinds(self) -> set[Any]:
        """The types that a value, or an entry of a list, may have."""
        return {self.type, *typing.get_args(self.type)}

    def read(self, value: Any) -> Any:
        """Return a value with its paths absolute.

        Raises:
            ValueError: The value is refused; the message is a whole sentence.
        """
        is_null = value is None and type(None) in self.kinds
        chosen = {shown(each): each for each in self.choices}  # by text, in which 1 is not true
        if self.choices and shown(value) not in chosen and not is_null:
            hint = did_you_mean(str(value), chosen)
            known = ", ".join(chosen)
            raise ValueError(self.refusal(value, f"expected one of {known}", hint))
        value = chosen.get(shown(value), value)
        is_list = isinstance(value, (list, tuple))
        try:
            read = list(map(self._read_entry, value)) if is_list else self._read_entry(value)
            pattern, remedy = self.form or (".*", "")
            entries = filter(None, read if is_list else [read])
            if wrong := [each for each in entries if not re.fullmatch(pattern, str(each))]:
                raise ValueError(f"{', '.join(map(repr, wrong))}: {remedy}" if is_list else remedy)
            if self.check is not None and not (value is None and self.default is None):
                self.check(read)
        except ValueError as error:
            raise ValueError(self.refusal(value, str(error))) from error
        return read

    def _read_entry(self, entry: Any) -> Any:
        if isinstance(entry, bool) and {int, float} & self.kinds:
            raise ValueError("expected a number")
        if isinstance(entry, float) and int in self.kinds and float not in self.kinds:
            raise ValueError("expected a whole number")  # an interpolation would insert 2.0
        if not isinstance(entry, str):
            return entry
        if problem := self._text_problem(entry):
            raise ValueError(problem)
        return _absolute(entry) if self.is_path else entry

    def _text_problem(self, text: str) -> str | None:
        if self.is_path and not text:
            return "is empty; give a path (was a variable of the shell not set?)"
        if not text and type(None) in self.kinds:
            return "is empty; write null for none"
        if not text and self.default not in ("", MISSING):
            return f"is empty; leave it out for {shown(self.default)}"
        if _CONTROL.search(text) and not self.has_lines:
            return "line breaks and control characters are not allowed here"
        if self.is_name and (found := name_problem(text)):
            return found
        if self.is_path and max(map(_size, text.split("/"))) > _PART_BYTES:
            return f"a name in it is longer than {_PART_BYTES} bytes; shorten it"
        if _size(text) > _PATH_BYTES and not self.has_lines:
            return f"longer than {_PATH_BYTES} bytes; give a shorter one"
        return None

    def refusal(self, value: Any, problem: str, hint: str = "") -> str:
        """Return the sentence that refuses a value."""
        text = shown(value)
        written = repr(text) if _CONTROL.search(text) else text
        return f"{self.name}={shortened(written)}{hint}: {problem} ({self.text})."


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _absolute(text: str) -> str:
    """Return a path made absolute; symbolic links are resolved only if it contains '..'.

    `~` and environment variables that the shell left are expanded. The URL of an object store is
    returned unchanged.

    Raises:
        ValueError: A variable or user does not exist.
    """
    if "://" in text:
        return text
    path = Path(os.path.expandvars(text))
    if unset := [part for part in path.parts if part.startswith("$")]:
        raise ValueError(f"{unset[0]} is not set; give the path")
    try:
        path = path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError("the user does not exist; give the path") from error
    return str(path.resolve() if ".." in path.parts else path)


def build_record(root: type[_Record], values: Table) -> _Record:
    """Return a dataclass, including nested ones, from values by dotted key.

    Raises:
        WrongValuesError: Values have another type, are out of range, or break a rule of their key.
    """
    from pydantic import ValidationError

    kind: Any = root
    keys = {key.name: key for key in keys_of(root)}
    nested: Fields = {}
    wrong: dict[str, str] = {}
    for name, value in values.items():
        put(nested, name, _read(keys[name], value, wrong))
    try:
        record: _Record = adapter_of(kind).validate_python(nested)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            parts = list(map(str, each["loc"]))
            names = (".".join(parts[: count + 1]) for count in range(len(parts)))
            name = next(each for each in names if each in keys)
            wrong[name] = _sentence(keys[name], values.get(name), each)
    if wrong:
        raise WrongValuesError(wrong)
    return record


def _read(key: Key, value: Any, wrong: dict[str, str]) -> Any:
    try:
        return key.read(value)
    except ValueError as error:
        wrong[key.name] = str(error)
        return value


def _sentence(key: Key, value: Any, error: "ErrorDetails") -> str:
    """Return an error of pydantic as a sentence that names the key."""
    problem = _EXPECTED.get(error["type"], error["msg"].removeprefix("Input "))
    if isinstance(value, Mapping):
        entry = error["loc"][key.name.count(".") + 1 :]
        problem = ": ".join([*map(str, entry), problem])
    if key.ge is not None:
        kind = "a whole number" if int in key.kinds else "a number"
        null = " or null" * (type(None) in key.kinds)
        problem = f"expected {kind} from {key.ge} to {key.le}{null}"
    elif problem == _EXPECTED["list_type"] and isinstance(value, (str, int, float)) and value != "":
        problem = f"expected a list; write '{key.name}=[{shortened(shown(value)).strip('[]')}]'"
    return key.refusal(value, problem)


def put(values: Fields, name: str, value: Any) -> None:
    """Set the value of a dotted name in nested mappings."""
    *sections, leaf = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[leaf] = value


def keys_of(root: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(root)
    for each in dataclasses.fields(root):
        name, kind = f"{prefix}{each.name}", hints[each.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from keys_of(kind, f"{name}.")
            continue
        factory = each.default_factory
        default = each.default if factory is dataclasses.MISSING else factory()
        yield Key(
            name=name, type=kind, default=[*default] if default == () else default, **each.metadata
        )


def name_problem(text: str) -> str | None:
    """Return why a text cannot be part of the names of files and jobs; None if it can."""
    rule = "use letters, digits and . _ -"
    if not text:
        return f"is empty; {rule}"
    if not _NAME.fullmatch(text) or text in (".", "..") or text.startswith("-"):
        return f"cannot be part of names of files and jobs; {rule}"
    if (size := len(text.encode())) > NAME_BYTES:
        return f"has {size} bytes, and a name at most {NAME_BYTES}; shorten it"
    return None


def shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(shown, value))}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def shortened(text: str) -> str:
    """Return a text, without its middle if it is long."""
    return text if len(text) <= 120 else f"{text[:60]}...{text[-20:]}"


def amount(value: float) -> str:
    """Return a number with three digits and a decimal prefix, such as `1.23 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
