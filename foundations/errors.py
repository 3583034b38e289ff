"""Exceptions that callers catch by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_LISTED = 20
_MOST_CHARACTERS = 4000  # of one message, which may repeat a value of a checkpoint


class CheckpointMismatchError(ValueError):
    """A checkpoint that differs from what is expected; every difference is listed.

    Attributes:
        problems: One sentence per difference, in the order found.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        given = [problems] if isinstance(problems, str) else problems
        self.problems: list[str] = [without_middle(printable(problem)) for problem in given]
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[CheckpointMismatchError], tuple[list[str]]]:
        return type(self), (self.problems,)


class UnreadTypeError(CheckpointMismatchError):
    """A sound checkpoint whose values are of a type that is not read here."""


def printable(text: str) -> str:
    """Return a text that may hold names of others, with their control characters spelled out.

    A terminal would obey them. Lines stay lines.
    """
    return "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
    )


def without_middle(text: str) -> str:
    """Return a message without the middle of a value that is far too long to be read."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    head, tail = text[: _MOST_CHARACTERS // 2], text[-_MOST_CHARACTERS // 4 :]
    return f"{head} ... ({len(text) - len(head) - len(tail)} characters) ... {tail}"


def first_names(names: Sequence[str], most: int = 8) -> str:
    """Return the first of several names, printable, and the number of the rest."""
    more = len(names) - most
    return printable(", ".join(names[:most])) + (f" and {more} more" if more > 0 else "")


def listed(problems: Sequence[str], prefix: str = "") -> list[str]:
    """Return the first problems of one kind, each after a prefix, and the number of the rest."""
    more = len(problems) - _MOST_LISTED
    shown = [prefix + problem for problem in problems[:_MOST_LISTED]]
    return shown + ([f"{prefix}... and {more} more like these"] if more > 0 else [])


def refuse(problems: Sequence[str]) -> None:
    """Raise CheckpointMismatchError with every problem, if there are any."""
    if problems:
        raise CheckpointMismatchError(problems)
