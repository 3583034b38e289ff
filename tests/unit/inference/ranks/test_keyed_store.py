"""The store of launched ranks: its values, and connections that do not prove their key."""

import socket
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from inference.ranks import keyed_store
from inference.ranks.keyed_store import KeyRefusedError, StoreServer, connect_store

KEY = bytes(range(32))


@pytest.fixture
def server() -> Iterator[StoreServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, KEY, timeout_s=5)
    yield server
    server.close()


def address(server: StoreServer) -> tuple[str, int]:
    host, port = server.listener.getsockname()
    return host, port


def test_all_connections_see_the_same_values(server):
    one, other = (
        connect_store(*address(server), KEY, timeout_s=5),
        server.store(),
    )
    one.set("name", b"\x00\xff")
    assert other.get("name") == b"\x00\xff"
    assert [store.add("count", 2) for store in (one, other, one.clone())] == [2, 4, 6]
    assert one.compare_set("name", b"else", b"new") == b"\x00\xff"
    assert one.compare_set("name", b"\x00\xff", b"new") == b"new"
    assert one.check(["name", "count"])
    assert not one.check(["name", "absent"])
    assert (one.num_keys(), one.delete_key("count"), other.num_keys()) == (2, True, 1)


def test_a_wait_for_an_absent_value_ends(server):
    store = connect_store(*address(server), KEY, timeout_s=5)
    with pytest.raises(RuntimeError, match=r"no value of absent within 0\.1 s"):
        store.wait(["absent"], timedelta(seconds=0.1))


def test_another_key_is_refused(server):
    with pytest.raises(KeyRefusedError):
        connect_store(*address(server), bytes(32), timeout_s=5)


def bytes_until_closed(connection: socket.socket) -> int:
    """Send one byte at a time until the other end has closed, at most 64; return how many."""
    for sent in range(64):
        try:
            connection.sendall(b"x")
        except ConnectionError:
            return sent
        time.sleep(0.1)
    return 64


def test_a_connection_that_proves_its_key_byte_by_byte_is_closed(server, monkeypatch):
    monkeypatch.setattr(keyed_store, "_HANDSHAKE_S", 0.5)
    with socket.create_connection(address(server)) as stranger:
        assert bytes_until_closed(stranger) < 60
