"""Messages of gRPC that are not what their call takes."""

import pytest
from tritonclient.grpc import service_pb2

from inference.front.guard import RejectedError
from inference.front.infer_messages import parsed


def test_message_of_another_kind_is_refused():
    kind = service_pb2.ModelReadyRequest
    assert parsed(kind, kind(name="m").SerializeToString()).name == "m"
    for message in (b"\xff", b"\x0a\x01\xff"):  # the second one's name is not UTF-8
        with pytest.raises(RejectedError, match="is not a ModelReadyRequest"):
            parsed(kind, message)
