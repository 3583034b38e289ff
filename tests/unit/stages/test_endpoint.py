"""The published address: where a reader reaches the server from."""

import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from stages import endpoint
from stages.endpoint import (
    ENDPOINT_NAME,
    ServerEndpoint,
    published_by,
    read_endpoint,
)
from stages.progress import DamagedFileError, write_json

SERVER = ServerEndpoint(
    "127.0.0.1", 8000, 8001, 8002, "gpt", None, "7", 1, 1, "2024-01-01T00:00:00Z"
)


def test_a_server_of_all_interfaces_is_named_by_its_node():
    server = replace(SERVER, host="node7")
    assert str(server) == "HTTP on node7:8000, gRPC on node7:8001"
    server = replace(SERVER, host="fd00::7")
    assert str(server) == "HTTP on [fd00::7]:8000, gRPC on [fd00::7]:8001"


def test_an_address_that_is_published_meanwhile_is_not_withdrawn(tmp_path, monkeypatch):
    """A job of a chain ends while its successor takes over."""
    path, successor = tmp_path / ENDPOINT_NAME, replace(SERVER, job_id="8")
    publishing = threading.Thread(target=successor.publish, args=(path,))

    def read(path: Path) -> ServerEndpoint | None:
        found = read_endpoint(path)
        publishing.start()
        publishing.join(0.3)
        return found

    SERVER.publish(path)
    monkeypatch.setattr(endpoint, "read_endpoint", read)
    SERVER.withdraw(path)
    publishing.join()
    assert read_endpoint(path) == successor


@pytest.mark.parametrize("text", ["[1]", '"x"', '{"unknown": 1}', '{"host": '])
def test_what_holds_no_address_is_named_as_damaged(tmp_path, text):
    path = tmp_path / "endpoint.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedFileError, match=r"endpoint\.json is damaged"):
        read_endpoint(path)


def test_keys_of_a_later_version_are_ignored(tmp_path):
    path = tmp_path / ENDPOINT_NAME
    write_json(path, {**asdict(SERVER), "grpc_web": 8005})
    assert read_endpoint(path) == SERVER


def test_a_damaged_address_is_nobodys_and_is_withdrawn(tmp_path):
    path = tmp_path / ENDPOINT_NAME
    assert published_by(path) == ""
    SERVER.publish(path)
    assert published_by(path) == "7"
    replace(SERVER, job_id="6").withdraw(path)
    assert path.exists()
    path.write_text("{", encoding="utf-8")
    assert published_by(path) is None
    SERVER.withdraw(path)
    assert published_by(path) == ""
