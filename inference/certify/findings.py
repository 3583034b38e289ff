"""The vocabulary of a certificate: what was found, part by part."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


class Status(enum.StrEnum):
    """The result of a comparison, from the best to the worst: of several, the worst holds."""

    EQUAL = "equal"
    UP_TO = "equal up to"
    NOT_COMPUTED = "not computed"
    DIFFERS = "differs"


EQUAL, UP_TO, NOT_COMPUTED, DIFFERS = Status


@dataclass(frozen=True)
class Remark:
    """One thing that is not simply equal.

    Attributes:
        kind: in one or two words, such as "changed", "missing" or "rotary.base".
        where: the tensor, setting, text or layer.
    """

    status: Status
    kind: str
    where: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}" + (f": {self.detail}" if self.detail else "")


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
        own = [UP_TO] if self.up_to else [] if self.compared else [NOT_COMPUTED]
        return worst([*own, *(each.status for each in self.findings)])

    def of(self, status: Status) -> list[Remark]:
        """Return the findings of one status."""
        return [each for each in self.findings if each.status == status]


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst of several; equal of none."""
    return max(statuses, key=list(Status).index, default=EQUAL)


def not_computed(name: str, reason: str, where: str = "") -> Part:
    """Return a part that could not be computed."""
    return Part(name, "", (Remark(NOT_COMPUTED, "not computed", where or name, reason),))
