"""HTTP to servers of this machine, over TCP or a Unix socket; the standard library alone.

An address is `host:port`, or the path of a socket with every slash quoted: `%2Ftmp%2Fhttp`.
"""

from __future__ import annotations

import http.client
import socket
import urllib.parse
import urllib.request
from pathlib import Path


class _Connection(http.client.HTTPConnection):
    """A connection to `host:port`, or to a socket whose path stands for the host."""

    def __init__(self, host: str, *, timeout: float) -> None:
        self._socket = host if host.startswith("/") else None
        super().__init__(host if self._socket is None else "localhost", timeout=timeout)

    def connect(self) -> None:
        """Open the connection."""
        if self._socket is None:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket)


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """Send a request; urllib has unquoted its host."""
        return self.do_open(_Connection, req)  # type: ignore[arg-type]


def local_opener() -> urllib.request.OpenerDirector:
    """Return an opener for both kinds of address, which never asks a proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _Handler())


def socket_address(path: Path) -> str:
    """Return the address of a Unix socket, as it stands in a URL between `http://` and the path."""
    return urllib.parse.quote(str(path), safe="")
