"""Parameters of a served model's config.pbtxt that Slipway's engine reads, from parameters.tsv.

The engine reads its parameters by this table, repositories are checked with it before they are
built, and docs/engine.md shows it. To add a parameter, add a row and, if it is an option of the
engine, a field of the same name to `inference.engine.options.EngineOptions`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from foundations.errors import Reasons
from foundations.suggest import did_you_mean
from foundations.tables import read_cells

# The default limit of a sequence's tokens (max_seq_len); an encoder's attention grows with the
# square.
DEFAULT_MAX_SEQ_LEN = 4096
REQUIRED = "required"


@dataclass(frozen=True)
class Kind:
    """The values that a parameter may have."""

    words: str  # description of the values
    value: Callable[[str], Any]  # reads a text, or raises ValueError
    allows: Callable[[Any], bool] = lambda _: True  # whether a value is allowed

    def read(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError with the expected values."""
        try:
            if self.allows(value := self.value(text)):
                return value
        except ValueError:
            pass
        raise ValueError(f"must be {self.words}")

    def problem(self, text: str) -> str:
        """Return what was expected; "" if the text is a value."""
        try:
            self.read(text)
        except ValueError as error:
            return str(error)
        return ""


@dataclass(frozen=True)
class Parameter:
    """A parameter."""

    kind: Kind
    # The value if it is missing, as in config.pbtxt; a description if that depends on the model or
    # the machine; REQUIRED if the engine does not start without it.
    default: str
    meaning: str  # for docs and messages
    configured_by: str  # key of the configuration that sets it; "" if there is none


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(text)
    return int(text)


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(TOKEN_ID.read(each.strip()) for each in text.split(","))


@cache
def _kind(spelling: str) -> Kind:
    """Return the kind of values that a column of the table spells: a name, and bounds or words."""
    name, *given = spelling.split()
    match name:
        case "whole":
            low, high = map(int, given)
            words = f"a whole number from {low} to {high}"
            return Kind(words, _digits, lambda number: low <= number <= high)
        case "seconds":
            most = int(given[0])
            words = f"a number of seconds above 0, at most {most}"
            return Kind(words, float, lambda seconds: 0 < seconds <= most)
        case "one_of":
            words = f"one of {', '.join(given)}" if len(given) > 1 else given[0]
            return Kind(words, str, given.__contains__)
        case "flag":
            return Kind("0 or 1", lambda text: ("0", "1").index(text) == 1)
        case "token_ids":
            return Kind("token IDs separated by commas", _token_ids)
    assert name == "text", spelling
    return Kind("a text", str)


FLAG, TEXT, TOKEN_IDS = map(_kind, ("flag", "text", "token_ids"))
TOKEN_ID = _kind("whole 0 2147483647")


def _table() -> dict[str, Parameter]:
    _, *rows = read_cells(Path(__file__).with_suffix(".tsv"))
    return {
        name: Parameter(_kind(kind), default, meaning, "" if key == "-" else key)
        for name, kind, default, key, meaning in rows
    }


PARAMETERS = _table()
# Parameter -> field of a record, if the names differ.
FIELDS = {"tensor_para_size": "tp_size", "pipeline_para_size": "pp_size"}


def parameter_problems(given: Mapping[str, str]) -> Reasons:
    """Return name -> problem of parameters that the user adds to config.pbtxt."""
    found = {}
    for name, text in given.items():
        if (parameter := PARAMETERS.get(name)) is None:
            hint = did_you_mean(name, PARAMETERS)
            found[name] = f"is unknown{hint}; known parameters: {', '.join(PARAMETERS)}."
        elif parameter.configured_by:
            found[name] = f"is set by {parameter.configured_by}; set that instead."
        elif problem := parameter.kind.problem(text):
            found[name] = f"{problem} ({parameter.meaning})."
    return found
