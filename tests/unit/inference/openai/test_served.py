"""Errors of Triton as errors of OpenAI's API."""

from __future__ import annotations

import pytest
from tritonclient.utils import InferenceServerException

from inference.openai.served import api_error


@pytest.mark.parametrize(
    ("message", "status", "expected", "text"),
    [
        ("too long", "StatusCode.INVALID_ARGUMENT", 400, "too long"),
        ("the queue is full", "StatusCode.UNAVAILABLE", 503, "the queue is full"),
        ("a fault", "StatusCode.INTERNAL", 500, "a fault"),
        # Errors on a stream.
        ("too long: lower it", None, 400, "too long: lower it"),
        ("UNAVAILABLE: the queue is full", None, 503, "the queue is full"),
        ("INTERNAL: a fault", None, 500, "a fault"),
    ],
)
def test_an_error_has_the_status_of_its_kind(
    message: str, status: str | None, expected: int, text: str
) -> None:
    error = api_error(InferenceServerException(message, status))
    assert (error.status, str(error)) == (expected, text)
