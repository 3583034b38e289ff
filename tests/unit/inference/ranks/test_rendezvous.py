"""Followers that lose rank 0 while they join it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference.ranks.keyed_store import StoreServer
from inference.ranks.rendezvous import Follower, Rendezvous, RendezvousError
from inference.system.launch_environment import LaunchEnvironment

PLACES = [LaunchEnvironment(rank, 2, rank, 2, "test", "a") for rank in range(2)]


@pytest.mark.parametrize("operation", ["get", "add"])
def test_a_rank_0_that_ends_while_another_rank_joins_is_reported(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
