"""Free ports and the holders of taken ones."""

import os
import socket
from pathlib import Path

import pytest

from inference.system.ports import TakenPort, free_ports, pick_free_ports, port_problem


def test_picked_ports_differ_and_are_free():
    ports = pick_free_ports("127.0.0.1", 3)
    assert len(set(ports)) == 3
    assert [port_problem("127.0.0.1", port) for port in ports] == [None] * 3


def test_holder_of_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        problem = port_problem("127.0.0.1", holder.getsockname()[1])
    assert isinstance(problem, TakenPort)
    assert problem.startswith(f"is in use by process {os.getpid()} (")


def test_foreign_address_is_reported():
    problem = port_problem("192.0.2.1", 8000)
    assert problem is not None
    assert not isinstance(problem, TakenPort)
    assert "cannot be opened on 192.0.2.1" in problem


def test_picked_ports_are_not_those_of_outgoing_connections():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = pick_free_ports("127.0.0.1", 4)
    assert len(set(found)) == 4
    assert all(port < low for port in found) or low <= 10_000
    assert pick_free_ports("127.0.0.1", 0) == []


def test_held_port_is_given_to_nobody_and_a_server_can_listen_there():
    with free_ports("127.0.0.1", 1) as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held[0]))
        assert port_problem("127.0.0.1", held[0]) is None
        socket.create_server(("127.0.0.1", held[0])).close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_reported(port):
    assert port_problem("127.0.0.1", port) == "is not a port, which are 0 to 65535"
