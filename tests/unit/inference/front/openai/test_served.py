"""Errors of Triton as errors of OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import model_config_pb2

from inference.front.openai import served
from inference.front.openai.served import api_error, stream_error


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400),
        (grpc.StatusCode.UNAVAILABLE, 503),
        (grpc.StatusCode.INTERNAL, 500),
    ],
)
def test_an_error_has_the_status_of_its_code(code: grpc.StatusCode, status: int) -> None:
    none = grpc.aio.Metadata()
    error = api_error(grpc.aio.AioRpcError(code, none, none, details="too long"))
    assert (error.status, str(error)) == (status, "too long")


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        ("too long: lower it", 400, "too long: lower it"),
        ("UNAVAILABLE: the queue is full", 503, "the queue is full"),
        ("INTERNAL: a fault", 500, "a fault"),
    ],
)
def test_an_error_on_a_stream_has_the_status_that_it_begins_with(
    message: str, status: int, text: str
) -> None:
    error = stream_error(message)
    assert (error.status, str(error)) == (status, text)


def test_limits_of_another_projects_model_are_the_engines(tmp_path: Path) -> None:
    """Its inputs may have the same names; it must not keep the endpoint from opening."""
    config = model_config_pb2.ModelConfig(name="other", backend="python")
    assert served._model_limits(config, tmp_path) == (4096, None)
