"""The config of a model: a frozen dataclass per family; its fields are keys of config.ini."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

from export_scripts.families.layout.architecture import Architecture
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES

Sections = dict[str, dict[str, str]]
Index = Mapping[str, int | str]
Layers = tuple[int, ...] | None  # numbers of layers; None: all

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}
# With a damaged number of layers, the list of tensors would fill the memory.
MAX_LAYERS = 10_000
_MAX_MODULES = 1_000_000  # layers times experts
# Entries of a list per line of config.ini.
_ROW = 8
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")

ConfigT = TypeVar("ConfigT", bound="FTConfig")
ArchitectureT = TypeVar("ArchitectureT", bound=Architecture)


def ini_field(default: Any = dataclasses.MISSING, **special: Any) -> Any:
    """Declare a config field with another key or spelling in config.ini.

    Args:
        default: The value if the key is absent; a field without default is required.
        **special: Any of
            key: The key in the file, if it is not the field's name.
            as_digit: Write a boolean as 1 or 0, for keys that the loader reads as integers.
            unless_default: Do not write the default value.
            absent: Computes the value of a key that other writers omit from (sections, names of the
                folder's files).
    """
    return dataclasses.field(default=default, metadata=special)


@dataclass(frozen=True, kw_only=True)
class PromptTask:
    """A p-tuned task, whose table has the embeddings of `prompt_length` virtual tokens."""

    task_name: str
    prompt_length: int


@dataclass(frozen=True, kw_only=True)
class FTConfig:
    """Base of every family's config; the fields are config.ini keys verbatim.

    A field whose value is None is not written. `tasks` are the p-tuned prompt tables, in sections
    [task_<i>].
    """

    # The main section, and further sections that a family always writes.
    SECTION: ClassVar[str] = ""
    EXTRA_SECTIONS: ClassVar[tuple[str, ...]] = ()
    # Field -> sections that hold it, if not only the main one; all have the same value.
    PLACES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Placeholder in the layout's names -> the config field with its count.
    INDICES: ClassVar[Mapping[str, str]] = {"layer": "num_layer"}

    weight_data_type: str
    tensor_para_size: int = 1
    prompt_learning_start_id: int | None = None
    prompt_learning_type: int | None = None
    tasks: tuple[PromptTask, ...] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: There are `problems`; all are listed.
        """
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return a problem for each value that no runtime computes or no file can hold."""
        found = []
        if self.tensor_para_size < 1:
            found.append(
                f"config.ini tensor_para_size = {self.tensor_para_size}; expected at least 1"
            )
        if self.weight_data_type not in WEIGHT_DATA_TYPES:
            found.append(
                f"config.ini weight_data_type = {self.weight_data_type}; known: "
                f"{', '.join(WEIGHT_DATA_TYPES)}"
            )
        counts = {name: getattr(self, name) for name in self.INDICES.values()}
        if max(counts.values()) > MAX_LAYERS or math.prod(counts.values()) > _MAX_MODULES:
            sizes = ", ".join(f"{name} = {count}" for name, count in counts.items())
            found.append(f"{sizes}: more layers than any model has; the configuration is damaged")
        return found

    def architecture(self) -> Architecture:
        """Return the architecture that the runtime builds.

        Raises:
            ValueError: Loaders abort on a choice, or it contradicts another.
        """
        raise NotImplementedError

    def build_architecture(self, kind: type[ArchitectureT], **own: Any) -> ArchitectureT:
        """Return an architecture from `own` and from this config's values of the same names."""
        names = (field.name for field in dataclasses.fields(kind))
        same = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return kind(**{**same, **own})

    def ft_limits(self) -> list[str]:
        """Return every reason why NVIDIA's FasterTransformer backend computes something else."""
        return []

    @property
    def prompt_length(self) -> Mapping[str, int]:
        """Name of a prompt task -> number of virtual tokens."""
        return {task.task_name: task.prompt_length for task in self.tasks}

    def index_values(self, placeholder: str) -> Sequence[int | str]:
        """Return the values of a placeholder such as {layer} or {task}, in order."""
        if placeholder == "task":
            return [task.task_name for task in self.tasks]
        return range(getattr(self, self.INDICES[placeholder]))

    def dim(self, name: str | int, index: Index) -> int:
        """Return the size of a dimension: a number, or a sum of products of fields or properties.

        Raises:
            ValueError: A field is missing or negative.
        """
        if isinstance(name, int):
            return name
        terms = (term.split("*") for term in name.split("+"))
        return sum(math.prod(self._size(each, index) for each in term) for term in terms)

    def _size(self, name: str, index: Index) -> int:
        value = getattr(self, name)
        if isinstance(value, Mapping):
            value = value[index["task"]]
        if value is None or value < 0:
            raise ValueError(f"{name} = {value}: tensors of the model need a positive number")
        return int(value)

    def sections(self) -> Sections:
        """Return the sections and keys of config.ini, spelled for the loader."""
        names = [self.SECTION, *self.EXTRA_SECTIONS]
        out: Sections = {name: {} for name in names}
        for field in ini_fields(type(self)):
            value = getattr(self, field.name)
            if value is None or (field.metadata.get("unless_default") and value == field.default):
                continue
            for section in self.PLACES.get(field.name, (self.SECTION,)):
                out[section][_key(field)] = _spell(value, field.metadata.get("as_digit", False))
        if self.tasks:
            out[self.SECTION]["num_tasks"] = str(len(self.tasks))
        for number, task in enumerate(self.tasks):
            values = dataclasses.asdict(task)
            out[f"task_{number}"] = {name: str(value) for name, value in values.items()}
        return out

    @classmethod
    def from_sections(
        cls: type[ConfigT], sections: Sections, files: Collection[str] = ()
    ) -> ConfigT:
        """Return the config from parsed sections: section -> key -> text, names in lower case.

        `files` are the existing weight files, for values that only these show.

        Raises:
            ValueError: Keys are missing or have the wrong type, or values contradict each other;
                all are listed.
        """
        values = {}
        problems = []
        hints = get_type_hints(cls)
        for field in ini_fields(cls):
            section = cls.PLACES.get(field.name, (cls.SECTION,))[0]
            text = sections.get(section, {}).get(_key(field).lower())
            if text is None:
                if absent := field.metadata.get("absent"):
                    values[field.name] = absent(sections, files)
                elif field.default is dataclasses.MISSING:
                    problems.append(f"config.ini [{section}] has no {_key(field)}")
                continue
            try:
                values[field.name] = parse_value(text, hints[field.name])
            except ValueError as error:
                problems.append(f"config.ini [{section}] {_key(field)}: {error}")
        tasks = _parse_tasks(sections, cls.SECTION, problems)
        if problems:
            raise ValueError("\n".join(problems))
        return cls(**values, tasks=tasks)


def ini_fields(cls: type[FTConfig]) -> list[dataclasses.Field[Any]]:
    """Return the fields that are keys of config.ini; prompt tasks are sections."""
    return [f for f in dataclasses.fields(cls) if f.name != "tasks"]


def _key(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("key") or field.name


def _spell(value: Any, as_digit: bool) -> str:
    if isinstance(value, bool):
        return str(int(value)) if as_digit else str(value)
    if isinstance(value, tuple):
        # The loader splits long lines; a list is continued on indented ones.
        rows = (value[at : at + _ROW] for at in range(0, len(value), _ROW))
        return ",\n".join(",".join(str(each) for each in row) for row in rows)
    return str(value)


def parse_value(text: str, hint: Any) -> Any:
    """Return the value of a config.ini key from its text and the type of the field.

    Raises:
        ValueError: The text is not a value of this type.
    """
    kind = str(hint)
    if "tuple" in kind:
        entry = float if "float" in kind else int
        return tuple(parse_value(each.strip(), entry) for each in text.split(",") if each.strip())
    if "str" in kind:
        return text
    if "bool" in kind:
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is not a boolean (true/yes/on/1, false/no/off/0)")
        return _BOOLEANS[text.lower()]
    if "float" in kind:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
    return parse_integer(text)


def parse_integer(text: str) -> int:
    """Return the integer that the loader reads: strtol with base 0 (0x is hexadecimal, 0 octal).

    Raises:
        ValueError: The whole text is not an integer; the loader would abort or truncate it.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is not an integer")
    digits = text.lstrip("+-")
    base = 16 if digits[:2] in ("0x", "0X") else 8 if len(digits) > 1 and digits[0] == "0" else 10
    return int(text, base)


def _parse_tasks(sections: Sections, main: str, problems: list[str]) -> tuple[PromptTask, ...]:
    try:
        count = parse_integer(sections.get(main, {}).get("num_tasks", "0"))
        return tuple(
            PromptTask(
                task_name=sections[f"task_{i}"]["task_name"],
                prompt_length=parse_integer(sections[f"task_{i}"]["prompt_length"]),
            )
            for i in range(count)
        )
    except (KeyError, ValueError) as error:
        problems.append(f"config.ini prompt tasks are incomplete: {error}")
        return ()
