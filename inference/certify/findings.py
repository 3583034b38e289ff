"""The vocabulary of a certificate: what was found, part by part."""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """The result of a comparison, from the best to the worst: of several, the worst holds."""

    EQUAL = "equal"
    UP_TO = "equal up to"
    NOT_COMPUTED = "not computed"
    DIFFERS = "differs"


EQUAL, UP_TO, NOT_COMPUTED, DIFFERS = Status
_MOST_DIGITS = 1e-11  # what the rounding of a reciprocal leaves
_MOST_TEXT = 300  # characters of a value that is shown


@dataclass(frozen=True)
class Remark:
    """One thing that is not simply equal.

    Attributes:
        kind: in one or two words, such as "changed" or "missing".
        where: the tensor, setting, text or layer.
    """

    status: Status
    kind: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.kind, self.detail)))


def differs(kind: str, where: str, source: Any, folder: Any, status: Status = DIFFERS) -> Remark:
    """Return that the folder has another value than the source."""
    shown = (f"{each!r:.{_MOST_TEXT}}" for each in (folder, source))
    return Remark(status, kind, where, f"{', and '.join(shown)} in the source")


@dataclass(frozen=True)
class Part:
    """One part of a certificate.

    Attributes:
        compared: what was compared, for people; empty if nothing was.
        up_to: by what "equal up to" is bounded, in a few words.
        rows: everything that was computed, as JSON.
    """

    name: str
    compared: str
    findings: tuple[Remark, ...] = ()
    up_to: tuple[str, ...] = ()
    rows: Sequence[Any] = field(default=())

    @property
    def status(self) -> Status:
        """The worst of its findings; a part without anything compared was not computed."""
        own = UP_TO if self.up_to else EQUAL if self.compared else NOT_COMPUTED
        return worst([own, *(each.status for each in self.findings)])

    def of(self, status: Status) -> list[Remark]:
        """Return the findings of one status."""
        return [each for each in self.findings if each.status == status]


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several; equal of none."""
    return max(statuses, key=list(Status).index, default=EQUAL)


def not_computed(name: str, reason: str, where: str = "") -> Part:
    """Return a part that could not be computed."""
    return Part(name, "", (Remark(NOT_COMPUTED, "not computed", where or name, reason),))


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by their dotted names."""
    out: dict[str, Any] = {}
    for name, value in table.items():
        inner = dotted(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        out |= inner or {f"{prefix}{name}": value}
    return out


def is_same(one: Any, other: Any) -> bool:
    """Return whether two settings are the same, up to the rounding of a reciprocal."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_MOST_DIGITS)
    return bool(one == other)


def differing(
    source: Mapping[str, Any], folder: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names of settings that are not the same, each with both values."""
    mine, theirs = dotted(source), dotted(folder)
    for name in dict.fromkeys((*mine, *theirs)):
        if not is_same(one := mine.get(name), other := theirs.get(name)):
            yield name, one, other
