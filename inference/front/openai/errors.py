"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from inference.front.guard import RequestRefusedError

# So do clients and gateways tell them apart; LiteLLM knows a wrong key by the first words.
_CODES = {HTTPStatus.UNAUTHORIZED: "invalid_api_key"}
_WORDS = {HTTPStatus.UNAUTHORIZED: "Incorrect API key provided, or none: "}


class ApiError(RequestRefusedError):
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
        super().__init__(status, message)
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return ApiError, (str(self),), self.__dict__


def error_body(error: RequestRefusedError) -> dict[str, Any]:
    """Return an error as OpenAI's API sends it."""
    is_server = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return {
        "error": {
            "message": _WORDS.get(error.status, "") + str(error),
            "type": "server_error" if is_server else "invalid_request_error",
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None) or _CODES.get(error.status),
        }
    }
