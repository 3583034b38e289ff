"""The records of a certificate: statuses, remarks and parts."""

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foundations.files.json_content import dotted


class Status(enum.StrEnum):
    """The result of a comparison, from best to worst; the worst of several decides."""

    EQUAL = "equal"
    UP_TO = "equal up to"
    NOT_COMPUTED = "not computed"
    DIFFERS = "differs"


EQUAL, UP_TO, NOT_COMPUTED, DIFFERS = Status
_RECIPROCAL_ERROR = 1e-11  # relative error of a setting stored as a rounded reciprocal
_MAX_SHOWN = 300  # characters of a value


@dataclass(frozen=True)
class Remark:
    """A finding about one tensor, setting, text or layer.

    Attributes:
        kind: one or two words, such as "changed" or "missing".
        where: the name of the tensor, setting, text or layer.
    """

    status: Status
    kind: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.kind, self.detail)))


def differs(kind: str, where: str, source: Any, folder: Any, status: Status = DIFFERS) -> Remark:
    """Return a remark that a value of the folder is not the source's."""
    shown = (f"{value!r:.{_MAX_SHOWN}}" for value in (folder, source))
    return Remark(status, kind, where, f"{', and '.join(shown)} in the source")


@dataclass(frozen=True)
class Part:
    """One part of a certificate.

    Attributes:
        compared: human-readable summary of what was compared; empty if nothing was.
        up_to: the bounds of "equal up to", a few words each.
        rows: every computed value, as JSON.
    """

    name: str
    compared: str
    findings: tuple[Remark, ...] = ()
    up_to: tuple[str, ...] = ()
    rows: Sequence[Any] = field(default=())

    @property
    def status(self) -> Status:
        """The worst status of its findings; a part that compared nothing was not computed."""
        least = UP_TO if self.up_to else EQUAL if self.compared else NOT_COMPUTED
        return worst([least, *(remark.status for remark in self.findings)])

    def of(self, status: Status) -> list[Remark]:
        """Return the findings that have a status."""
        return [remark for remark in self.findings if remark.status == status]


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status; "equal" if there is none."""
    return max(statuses, key=list(Status).index, default=EQUAL)


def not_computed(name: str, reason: str, where: str = "") -> Part:
    """Return a part that could not be computed."""
    return Part(name, "", (Remark(NOT_COMPUTED, "not computed", where or name, reason),))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal, up to the rounding of a reciprocal."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=_RECIPROCAL_ERROR)
    return bool(one == other)


def differing(
    source: Mapping[str, Any], folder: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, source's value, folder's) of settings that differ; None: missing."""
    source, folder = dotted(source), dotted(folder)
    for name in dict.fromkeys((*source, *folder)):
        if not is_same(one := source.get(name), other := folder.get(name)):
            yield name, one, other
