"""Errors of the server as its clients see them."""

from __future__ import annotations

from inference.gateway.rules import UNREACHABLE, without_internal_names


def test_errors_do_not_name_the_servers_sockets() -> None:
    error = "failed to connect; unix:/run/user/7/slipway-sockets-a_1/grpc:8001: refused (111)"
    assert without_internal_names(error) == UNREACHABLE
    assert without_internal_names("unix:/run/x is not a token") == "unix:/run/x is not a token"
