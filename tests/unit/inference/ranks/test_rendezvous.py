"""Followers that lose rank 0 while they join it."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inference.ranks import rendezvous as module
from inference.ranks.keyed_store import StoreServer, write_private
from inference.ranks.rendezvous import Follower, Rendezvous, RendezvousError
from inference.system.launch_environment import LaunchEnvironment
from inference.system.ports import pick_free_ports
from tests.waiting import until

PLACES = [LaunchEnvironment(rank, 2, rank, 2, "test", "a") for rank in range(2)]


@pytest.mark.parametrize("operation", ["get", "add"])
def test_a_rank_0_that_ends_while_another_rank_joins_is_reported(operation, tmp_path, monkeypatch):
    apply = StoreServer._apply

    def end(self: StoreServer, name: str, *arguments: Any) -> Any:
        if name == operation:
            raise ConnectionResetError
        return apply(self, name, *arguments)

    rendezvous = Rendezvous(PLACES[0], "127.0.0.1", 0, key_file=tmp_path / "key", timeout_s=5)
    port = rendezvous._server.listener.getsockname()[1]
    try:
        with monkeypatch.context() as patch:
            patch.setattr(StoreServer, "_apply", end)
            with pytest.raises(RendezvousError, match=f"rank 0 at 127.0.0.1:{port} is gone"):
                Follower(PLACES[1], "127.0.0.1", port, key_file=tmp_path / "key", timeout_s=5)
    finally:
        rendezvous.close(grace_s=0)


def test_a_rank_that_sees_the_key_and_not_the_port_tells_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_UNREACHED_S", 0)
    key_file = tmp_path / "key"
    rendezvous = Rendezvous(PLACES[0], "127.0.0.1", 0, key_file, timeout_s=5)
    (closed,) = pick_free_ports("127.0.0.1", 1)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Follower, PLACES[1], "127.0.0.1", closed, key_file, timeout_s=5)
        try:
            until(lambda: bool(rendezvous.problems()), "the note of the rank")
            assert f"127.0.0.1:{closed} (Connection refused)" in rendezvous.problems()[1]
        finally:
            rendezvous.close(grace_s=0)
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{closed}"):
            joining.result()
    assert list(tmp_path.iterdir()) == []


def test_a_note_of_another_launch_is_nothing(tmp_path):
    key_file = tmp_path / "key"
    rendezvous = Rendezvous(PLACES[0], "127.0.0.1", 0, key_file, timeout_s=5)
    note = module._note_file(key_file, 1)
    write_private(note, module._signature(b"another key") + b"lost")
    try:
        assert not rendezvous.problems()
    finally:
        rendezvous.close(grace_s=0)
    assert note.exists()
