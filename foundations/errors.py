"""Exceptions that callers catch by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Reasons = dict[str, str]  # name of a setting, a file or another thing -> what is wrong with it

_MAX_LISTED = 20
_MAX_CHARACTERS = 4000  # per message; it may quote a value of a checkpoint


class CheckpointMismatchError(ValueError):
    """A checkpoint is not what was expected; every difference is listed.

    Attributes:
        problems: One sentence per difference, in the order found.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        texts = [problems] if isinstance(problems, str) else problems
        self.problems: list[str] = [without_middle(printable(text)) for text in texts]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[CheckpointMismatchError], tuple[list[str]]]:
        return type(self), (self.problems,)


class UnreadTypeError(CheckpointMismatchError):
    """An intact checkpoint holds values of a type that is not supported here."""


def printable(text: str) -> str:
    """Return a text with control characters escaped, except line feeds.

    Names from a checkpoint may hold some, which a terminal would obey.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def without_middle(text: str) -> str:
    """Return a message without its middle if it is too long to read."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    head, tail = text[: _MAX_CHARACTERS // 2], text[-_MAX_CHARACTERS // 4 :]
    return f"{head} ... ({len(text) - len(head) - len(tail)} characters) ... {tail}"


def first_names(names: Sequence[str], most: int = 8) -> str:
    """Return the first names, printable, and the number of the others."""
    more = len(names) - most
    return printable(", ".join(names[:most])) + (f" and {more} more" if more > 0 else "")


def listed(problems: Sequence[str], prefix: str = "") -> list[str]:
    """Return the first problems of one kind, each with a prefix, and the number of the others."""
    more = len(problems) - _MAX_LISTED
    shown = [prefix + problem for problem in problems[:_MAX_LISTED]]
    return shown + ([f"{prefix}... and {more} more like these"] if more > 0 else [])


def problem_of(check: Callable[..., object], *values: Any) -> str:
    """Return why a check refuses values, the text of its ValueError; empty if it does not."""
    try:
        check(*values)
    except ValueError as error:
        return str(error)
    return ""


def refuse(problems: Sequence[str], where: object = None) -> None:
    """Raise CheckpointMismatchError with every problem, if there are any.

    With `where`, such as a path, it comes before each of the first problems of one kind.
    """
    if problems:
        raise CheckpointMismatchError(listed(problems, f"{where}: ") if where else problems)
