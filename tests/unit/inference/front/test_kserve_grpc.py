"""Messages of gRPC that are not what their call takes."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from inference.front.guard import RejectedError
from inference.front.kserve_grpc import _register_key


def test_message_that_registers_no_memory_is_refused() -> None:
    request = service_pb2.SystemSharedMemoryRegisterRequest(key="/slipway-client-a")
    assert _register_key(request.SerializeToString()) == "/slipway-client-a"
    for message in (b"\xff", b"\x12\x01\xff"):  # the second one's key is not UTF-8
        with pytest.raises(RejectedError, match="is not a SystemSharedMemoryRegisterRequest"):
            _register_key(message)
