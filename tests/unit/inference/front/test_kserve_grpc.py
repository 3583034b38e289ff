"""Messages of gRPC that are not what their call takes."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from inference.front.guard import RejectedError
from inference.front.infer_messages import parsed


def test_message_that_registers_no_memory_is_refused() -> None:
    kind = service_pb2.SystemSharedMemoryRegisterRequest
    request = kind(key="/slipway-client-a")
    assert parsed(kind, request.SerializeToString()).key == "/slipway-client-a"
    for message in (b"\xff", b"\x12\x01\xff"):  # the second one's key is not UTF-8
        with pytest.raises(RejectedError, match="is not a SystemSharedMemoryRegisterRequest"):
            parsed(kind, message)
