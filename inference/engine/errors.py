"""Why an engine does not answer a request that is sound in itself."""

from __future__ import annotations


class EngineBusyError(RuntimeError):
    """Too much is asked at once; the request may be sent again later."""


class EngineFailedError(RuntimeError):
    """The engine cannot answer: it was stopped, or a rank is gone."""


class RowError(RuntimeError):
    """One row could not be decoded; other rows go on."""
