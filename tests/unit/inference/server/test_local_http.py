"""Requests to a server of this machine cost nothing that they do not need."""

from __future__ import annotations

import ssl

import pytest

from inference.server.local_http import local_answer


def test_no_certificates_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("certificates are read")

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", read)
    with pytest.raises(OSError, match="No such file"):
        local_answer("%2Fnowhere", "/v2")
