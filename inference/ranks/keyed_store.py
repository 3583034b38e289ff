"""A store for launched ranks, open only to processes that hold the key of the launch.

Rank 0 makes a key for each launch and writes it to a file of mode 600 that the other ranks can
read; it never appears in arguments or variables. Both ends of a connection first prove with an HMAC
over fresh nonces that they hold the key, or the connection is closed. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import monotonic, sleep
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

_KEY_BYTES = _NONCE_BYTES = 32
_DIGEST = "sha256"
_MAX_BYTES = 16 << 20  # of one message
_HANDSHAKE_S = 5.0  # to prove possession of the key
# Most connections in their handshake; further ones are closed, and clients try again.
_MAX_HANDSHAKES = 64
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1

# `wait` is not among them: clients poll with `check`.
_OPERATIONS = ("set", "get", "add", "check", "compare_set", "delete_key", "num_keys")

Answer = Callable[..., Any]


class KeyRefusedError(RuntimeError):
    """The peer holds another key, or none."""


def write_key(path: Path) -> bytes:
    """Write a new key to a file that only its owner can read, and return it."""
    write_private(path, key := secrets.token_bytes(_KEY_BYTES))
    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


def read_private(path: Path) -> bytes:
    """Return the contents of a file of `write_private`.

    Raises:
        OSError: The file does not exist.
        PermissionError: It belongs to another user, or others can read it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} must belong to this user, with mode 600")
        return file.read()


def _operation(name: str) -> Any:
    """Return a store's method for one of the `_OPERATIONS`."""

    def apply(store: KeyedStore, *arguments: Any) -> Any:
        found = store._answer(name, *map(_as_json, arguments))
        return found.encode("latin-1") if isinstance(found, str) else found

    return apply


class KeyedStore(Store):
    """A connection to the values of a launch; errors are RuntimeErrors, as for torch's stores.

    Attributes:
        address: Address of this process on the network of the rendezvous.
    """

    def __init__(
        self, answer: Answer, connect: Callable[[], KeyedStore], address: str, timeout_s: float
    ) -> None:
        """Bind the store: `answer(operation, *arguments)` applies an operation to the values."""
        super().__init__()
        self.address = address
        self._answer, self._connect, self._timeout_s = answer, connect, timeout_s

    set: Any = _operation("set")
    add: Any = _operation("add")
    check: Any = _operation("check")
    compare_set: Any = _operation("compare_set")
    delete_key: Any = _operation("delete_key")
    num_keys: Any = _operation("num_keys")

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        value: bytes = _operation("get")(self, key)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline, pause_s = monotonic() + limit_s, _FIRST_POLL_S
        while not self.check(keys):
            if monotonic() > deadline:
                raise RuntimeError(f"no value of {', '.join(keys)} within {limit_s:g} s")
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def clone(self) -> KeyedStore:
        """Return another connection to the same values."""
        return self._connect()


class StoreServer:
    """The values of one launch, served by rank 0's process."""

    def __init__(self, listener: socket.socket, key: bytes, *, timeout_s: float) -> None:
        """Start threads that serve clients which hold the key."""
        self.listener, self._key, self._timeout_s = listener, key, timeout_s
        self._values = HashStore()
        self._values.set_timeout(timedelta(seconds=timeout_s))
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def store(self) -> KeyedStore:
        """Return rank 0's view of the values, without a connection."""
        address = self.listener.getsockname()[0]
        return KeyedStore(self._apply, self.store, address, self._timeout_s)

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        # Only a shutdown wakes a thread that waits in accept(), a close does not.
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                if self.listener.fileno() < 0:
                    return
                sleep(_LAST_POLL_S)  # such as too many open files
                continue
            if not self._handshakes.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError, EOFError, ValueError, TypeError, RuntimeError):
            try:
                connection = _authenticate(end, self._key, is_server=True)
            finally:
                self._handshakes.release()
            with connection:
                while True:
                    operation, *arguments = json.loads(connection.recv_bytes(_MAX_BYTES))
                    found = self._apply(operation, *arguments)
                    connection.send_bytes(json.dumps(found).encode())

    def _apply(self, operation: str, *arguments: Any) -> Any:
        if operation not in _OPERATIONS:
            raise ValueError(f"unknown operation {operation}")
        found = getattr(self._values, operation)(*arguments)
        return found.decode() if isinstance(found, bytes) else found


def connect_store(host: str, port: int, key: bytes, *, timeout_s: float) -> KeyedStore:
    """Return a connection to the store of rank 0.

    Raises:
        KeyRefusedError: The process that listens there holds another key.
        OSError: Nothing listens there.
    """
    with socket.create_connection((host, port), timeout=_HANDSHAKE_S) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(None)
        connection, address = _authenticate(end, key, is_server=False), end.getsockname()[0]
    lock = threading.Lock()

    def answer(*message: Any) -> Any:
        try:
            with lock:
                connection.send_bytes(json.dumps(message).encode())
                if not connection.poll(timeout_s):
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                return json.loads(connection.recv_bytes(_MAX_BYTES))
        except (OSError, EOFError, ValueError) as error:
            connection.close()  # a late answer must not be read as that of the next message
            raise RuntimeError(f"rank 0 at {host}:{port} does not answer: {error}") from error

    connect = partial(connect_store, host, port, key, timeout_s=timeout_s)
    return KeyedStore(answer, connect, address, timeout_s)


def _authenticate(end: socket.socket, key: bytes, *, is_server: bool) -> Connection:
    """Prove to the peer that this process holds the key, and vice versa; return the connection.

    Raises:
        KeyRefusedError: The peer does not hold the key, or takes too long to prove it.
    """
    connection = Connection(os.dup(end.fileno()))
    # Bounds the whole handshake, even if a peer sends byte by byte.
    timer = threading.Timer(_HANDSHAKE_S, partial(end.shutdown, socket.SHUT_RDWR))
    timer.daemon = True
    timer.start()
    own = secrets.token_bytes(_NONCE_BYTES)
    mine, theirs = (b"server", b"client") if is_server else (b"client", b"server")
    try:
        connection.send_bytes(own)
        other = connection.recv_bytes(_NONCE_BYTES)
        proof = hmac.digest(key, mine + own + other, _DIGEST)
        if not is_server:  # the client proves its key first
            connection.send_bytes(proof)
        expected = hmac.digest(key, theirs + other + own, _DIGEST)
        if not hmac.compare_digest(connection.recv_bytes(len(expected)), expected):
            raise KeyRefusedError("it holds another key")
        if is_server:
            connection.send_bytes(proof)
    except (OSError, EOFError) as error:
        connection.close()
        raise KeyRefusedError("it ended the connection before it proved its key") from error
    except KeyRefusedError:
        connection.close()
        raise
    finally:
        timer.cancel()
    return connection


def _as_json(value: Any) -> Any:
    """Return a JSON value: bytes (of text its UTF-8) become text of one character per byte."""
    if isinstance(value, str | bytes):
        return (value.encode() if isinstance(value, str) else value).decode("latin-1")
    return value
