"""Errors of the server as its clients see them."""

import time

import pytest

from inference.front.rules import READY_PATH, UNREACHABLE, parts_of_path, without_internal_names


def test_errors_do_not_name_the_servers_sockets():
    error = "failed to connect; unix:/run/user/7/slipway-sockets-a_1/grpc:8001: refused (111)"
    assert without_internal_names(error) == UNREACHABLE
    assert without_internal_names("unix:/run/x is not a token") == "unix:/run/x is not a token"


def test_errors_do_not_name_a_session_as_no_client_knows_it():
    error = "inference request for sequence 8116798344233945847 to model 'm' must specify START"
    assert without_internal_names(error).startswith("inference request for this sequence to model")
    error = f"session {'0a' * 32} is still being answered; 2 of 4096 tokens are left"
    assert without_internal_names(error).startswith("this session is still being answered; 2 of")


@pytest.mark.parametrize(
    "quoted",
    ["unix:", "unix:/", "slipway-", "slipway-1", "/slipway-1-", "triton_python_backend_shm_region",
     "session ", "sequence 0", "sequence 0123456789", "session 0a0a", "unix:slipway-1-"],
)  # fmt: skip
def test_an_error_that_quotes_a_long_request_is_read_at_once(quoted):
    """100 kB of `unix:` took the front 15 s, in which no one was answered."""
    text = quoted * ((4 << 20) // len(quoted))
    began = time.process_time()
    without_internal_names(text)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("method", "path", "passes"),
    [
        ("GET", READY_PATH, True),
        ("HEAD", READY_PATH, True),
        ("POST", READY_PATH, False),
        ("HEAD", "/v2/models/m/infer", False),
        ("POST", "/v2/models/m/infer", True),
        ("POST", "/v2/repository/models/m/load", False),
        ("POST", "/v2/systemsharedmemory/region/a/register", False),
    ],
)
def test_a_table_says_what_clients_may_send(method, path, passes):
    assert (parts_of_path(method, path) is not None) == passes
