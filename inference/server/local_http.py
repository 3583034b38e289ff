"""HTTP to servers of this machine, over TCP or a Unix socket; the standard library alone.

An address is `host:port`, or the path of a socket with every slash quoted: `%2Ftmp%2Fhttp`.
"""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from inference.server.server_log import short_reason

_TIMEOUT_S = 5.0


class _Connection(http.client.HTTPConnection):
    """A connection to `host:port`, or to a socket with its path in place of the host."""

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
    """Return an opener for both kinds of address, which uses no proxy and follows no redirection.

    `build_opener` adds HTTPS, for which Python 3.12 reads the system's certificates each time: 50
    ms, which the stage's checks of its server would spend many times a second.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Handler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def socket_address(path: Path) -> str:
    """Return the address of a Unix socket, for a URL between `http://` and the path."""
    return urllib.parse.quote(str(path), safe="")


@dataclass(frozen=True)
class ModelStatus:
    """One line of the server's repository index."""

    name: str
    state: str  # READY, UNAVAILABLE, LOADING, UNLOADING, or "" if it was never loaded
    reason: str


def model_statuses(address: str) -> list[ModelStatus]:
    """Return the state of every model of the repository. Raises OSError if it does not answer."""
    entries = json.loads(local_answer(address, "/v2/repository/index", body=b"{}"))
    return [
        ModelStatus(entry["name"], entry.get("state", ""), short_reason(entry.get("reason", "")))
        for entry in entries
    ]


def local_answer(address: str, path: str, *, body: bytes | None = None) -> bytes:
    """Return the answer of the server at an address of either kind.

    Raises:
        OSError: The server does not answer, or refuses.
    """
    request = urllib.request.Request(f"http://{address}{path}", data=body)
    with local_opener().open(request, timeout=_TIMEOUT_S) as response:
        return bytes(response.read())
