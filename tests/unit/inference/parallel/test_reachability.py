"""Ranks that do not reach each other, and the addresses at which they wait."""

import json
import socket

import pytest
from torch._C._distributed_c10d import HashStore

from inference.parallel.reachability import check_reachable, listening_address


def test_a_rank_that_cannot_be_reached_is_named():
    store = HashStore()
    store.set("tried/1", json.dumps([None, "node2 cannot reach node3"]))
    with socket.socket() as deaf:  # it has a port, and does not listen
        deaf.bind(("127.0.0.1", 0))
        closed = deaf.getsockname()[1]
        store.set("at/1", json.dumps(["node2", "127.0.0.1", closed]))
        with pytest.raises(
            RuntimeError, match=f"node2 at 127.0.0.1, port {closed}: Connection refused"
        ):
            check_reachable(store, "127.0.0.1", 0, 2, timeout_s=5)
    # The others hear of it.
    assert f"port {closed}" in store.get("tried/0").decode()


def test_the_interface_of_gloo_decides_the_address(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert listening_address("10.0.0.7") == "10.0.0.7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert listening_address("10.0.0.7") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    with pytest.raises(RuntimeError, match="GLOO_SOCKET_IFNAME=absent0"):
        listening_address("10.0.0.7")
