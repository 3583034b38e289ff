"""The front as its owner sees it."""

from __future__ import annotations

from pathlib import Path

from inference.front.access import OPEN_ACCESS
from inference.front.link import FrontProcess, FrontSettings, Readiness, Served
from inference.front.sockets import ServerSockets
from inference.ports import TRITON_PORTS, pick_free_ports
from inference.server.client import TritonClient
from tests.fake_triton import FakeTriton, served
from tests.waiting import until

HOST = "127.0.0.1"


def test_no_client_sees_readiness_before_the_owner_says_so(tmp_path: Path) -> None:
    """A tritonserver is ready by gRPC before it listens for HTTP."""
    ports = dict(zip(TRITON_PORTS, pick_free_ports(HOST, len(TRITON_PORTS)), strict=True))
    with (
        served(FakeTriton({}), f"unix:{ServerSockets(tmp_path).grpc}"),
        TritonClient(f"{HOST}:{ports['grpc']}") as client,
    ):
        settings = FrontSettings(Served(tmp_path, None), HOST, ports, OPEN_ACCESS, None, tmp_path)
        front = FrontProcess(settings, log_path=tmp_path / "log")
        try:
            until(lambda: front.serves(tmp_path))
            assert not client.is_ready()
            front.send(Readiness(tmp_path, is_ready=True))
            until(client.is_ready)
        finally:
            front.end()
