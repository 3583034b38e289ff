"""Credentials of a client: TLS, by which it trusts a server, and a token, for the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.front.access import read_tokens, secret_problem


@dataclass(frozen=True)
class Credentials:
    """TLS and the token of a connection.

    Attributes:
        uses_tls: encrypt, and check the server's certificate.
        ca: certificate authorities to trust, PEM; None for those of this machine.
        token_file: a file of mode 600 whose first line is sent as a token; None sends none.
    """

    uses_tls: bool = False
    ca: Path | None = None
    token_file: Path | None = None

    def problems(self, *, prefix: str = "--", joiner: str = "-") -> list[str]:
        """Return the problems of the files, by option; they are read."""
        found = []
        if self.ca is not None and not self.ca.is_file():
            found.append(f"{prefix}ca={self.ca} is not a file.")
        if self.token_file is not None:
            name = f"{prefix}token{joiner}file={self.token_file}"
            if problem := secret_problem(self.token_file):
                found.append(f"{name} {problem}")
            else:
                try:
                    read_tokens(self.token_file)
                except ValueError as error:
                    found.append(f"{name} {error}")
        return found

    def headers(self) -> dict[str, str]:
        """Return the headers that authorize a request. Raises OSError or ValueError."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {read_tokens(self.token_file)[0]}"}

    def client_arguments(self, protocol: str) -> dict[str, Any]:
        """Return what tritonclient's client of a protocol, grpc or http, takes for TLS.

        Raises:
            ValueError: Its library has no TLS over HTTP with this Python.
        """
        if not self.uses_tls:
            return {}
        ca = None if self.ca is None else str(self.ca)
        if protocol == "grpc":
            return {"ssl": True, "root_certificates": ca}
        from gevent.ssl import create_default_context
        from geventhttpclient import connectionpool

        if not hasattr(connectionpool, "SSLConnectionPool"):
            raise ValueError(
                "tritonclient has no TLS over HTTP with this Python: install geventhttpclient "
                "2.0.12, or use gRPC (grpcs://)."
            )
        return {"ssl": True, "ssl_context_factory": lambda: create_default_context(cafile=ca)}


PLAIN = Credentials()
