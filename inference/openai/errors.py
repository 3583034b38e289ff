"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class ApiError(Exception):
    """A request that is not answered.

    Attributes:
        param: the field of the request that is wrong, if it is one.
        code: OpenAI's word for what is wrong, if it has one.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API sends it."""
        is_server = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "server_error" if is_server else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Problems:
    """The problems of one request, reported together."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []
        self._code = ""  # of the first

    def add(self, param: str, message: str, *, code: str = "invalid_value") -> None:
        """Note what is wrong with a field."""
        self._found.append((param, message))
        self._code = self._code or code

    def check(self) -> None:
        """Raise ApiError if there are any."""
        if self._found:
            text = "; ".join(f"{param}: {message}" for param, message in self._found)
            raise ApiError(text, param=self._found[0][0], code=self._code)
