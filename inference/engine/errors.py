"""Errors of an engine that cannot answer a valid request."""


class EngineBusyError(RuntimeError):
    """The queue is full; the request may be sent again later."""


class EngineFailedError(RuntimeError):
    """The engine cannot answer: it was stopped, or a rank has failed."""


class RowError(RuntimeError):
    """One row could not be decoded; other rows continue."""


class GrammarError(RowError, ValueError):
    """No token can follow within the grammar that a row's request asks for."""
