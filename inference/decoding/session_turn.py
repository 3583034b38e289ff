"""Which conversation a request belongs to; known to clients and engine alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SessionTurn:
    """One request of a session, perhaps its first or its last; `session_id` is not 0 nor empty."""

    session_id: int | str
    starts: bool = False
    ends: bool = False
