"""The config of a model: a frozen dataclass per family whose fields are keys of config.ini."""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_type_hints

from export_scripts.families.layout.architecture import Architecture
from export_scripts.numeric.dtypes import WEIGHT_DATA_TYPES
from foundations.files.json_content import Fields

Sections = dict[str, dict[str, str]]
Index = Mapping[str, int | str]
Layers = tuple[int, ...] | None  # numbers of layers; None: all

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}
# A damaged number must not list tensors until memory runs out.
MOST_LAYERS = 10_000
_MOST_MODULES = 1_000_000  # layers times experts
# Entries of a list on a line of config.ini.
_ROW = 8
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")

ConfigT = TypeVar("ConfigT", bound="FTConfig")
ArchitectureT = TypeVar("ArchitectureT", bound=Architecture)


def ini_field(default: Any = dataclasses.MISSING, **special: Any) -> Any:
    """Declare a config field that differs in config.ini from its name, or in its spelling.

    Args:
        default: Value when the key is absent; a field without one is required.
        **special: Any of
            key: Key in the file, when it is not the field's name.
            as_digit: Write a boolean as 1 or 0, for keys the loader reads as integers.
            unless_default: Leave the key out where the value is the default.
            absent: Makes the value of a key that other writers leave out, of the sections and the
                names of the folder's files.
    """
    return dataclasses.field(default=default, metadata=special)


@dataclass(frozen=True, kw_only=True)
class PromptTask:
    """One p-tuned task: its table holds `prompt_length` virtual-token embeddings."""

    task_name: str
    prompt_length: int


@dataclass(frozen=True, kw_only=True)
class FTConfig:
    """Base of every family's config; the fields are config.ini keys verbatim.

    A field whose value is None is not written. `tasks` are the p-tuned prompt tables, kept in
    sections [task_<i>].
    """

    # Section of keys that name no other; further sections a family always writes.
    SECTION: ClassVar[str] = ""
    EXTRA_SECTIONS: ClassVar[tuple[str, ...]] = ()
    # Sections that hold a field, where these are not the main one alone; all get the same value.
    PLACES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Index placeholders of the layout's names -> the config field that counts them.
    INDICES: ClassVar[Mapping[str, str]] = {"layer": "num_layer"}

    weight_data_type: str
    tensor_para_size: int = 1
    prompt_learning_start_id: int | None = None
    prompt_learning_type: int | None = None
    tasks: tuple[PromptTask, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that do not belong together.

        Raises:
            ValueError: There are any; all problems are listed.
        """
        if problems := self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return what no runtime computes or no file holds."""
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
        if max(counts.values()) > MOST_LAYERS or math.prod(counts.values()) > _MOST_MODULES:
            sizes = ", ".join(f"{name} = {count}" for name, count in counts.items())
            found.append(f"{sizes}: more layers than any model has; the configuration is damaged")
        return found

    def architecture(self) -> Architecture:
        """Return what the runtime builds.

        Raises:
            ValueError: A choice is one that loaders abort on, or contradicts another.
        """
        raise NotImplementedError

    def built(self, kind: type[ArchitectureT], **own: Any) -> ArchitectureT:
        """Return the architecture of some choices, and of this config's of the same name."""
        names = (field.name for field in dataclasses.fields(kind))
        same = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return kind(**{**same, **own})

    def ft_limits(self) -> list[str]:
        """Return the reasons for which NVIDIA's FasterTransformer backend errs with the model."""
        return []

    @property
    def prompt_length(self) -> Mapping[str, int]:
        """Virtual tokens of each prompt task by its name."""
        return {task.task_name: task.prompt_length for task in self.tasks}

    def index_values(self, placeholder: str) -> Sequence[int | str]:
        """Return the values a placeholder such as {layer} or {task} takes, in order."""
        if placeholder == "task":
            return [task.task_name for task in self.tasks]
        return range(getattr(self, self.INDICES[placeholder]))

    def dim(self, name: str | int, index: Index) -> int:
        """Return the size of a dimension: a number, or a field or property of this config.

        Raises:
            ValueError: It is not there, or negative.
        """
        if isinstance(name, int):
            return name
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
        """Build the config from parsed sections: section -> key -> text, names in lower case.

        `files` are the weight files present, for facts that only presence shows.

        Raises:
            ValueError: Keys missing or not readable as their type, or values that do not belong
                together; all of them are listed.
        """
        values: Fields = {}
        problems: list[str] = []
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
    """Return the fields that are keys of config.ini; prompt tasks have sections of their own."""
    return [f for f in dataclasses.fields(cls) if f.name != "tasks"]


def _key(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("key") or field.name


def _spell(value: Any, as_digit: bool) -> str:
    if isinstance(value, bool):
        return str(int(value)) if as_digit else str(value)
    if isinstance(value, tuple):
        # The loader splits long lines; a list goes on in indented ones.
        rows = (value[at : at + _ROW] for at in range(0, len(value), _ROW))
        return ",\n".join(",".join(str(each) for each in row) for row in rows)
    return str(value)


def parse_value(text: str, hint: Any) -> Any:
    """Return the value of a config.ini key from its text, by the type of the config's field.

    Raises:
        ValueError: The text is not such a value.
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
    """Return the integer the loader reads: strtol base 0, where 0x is hexadecimal and 0 octal.

    Raises:
        ValueError: The text is not wholly an integer; the loader would end its process or cut it.
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
