"""A server that is kept running: requests to reload and to end, without a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stages import service
from stages.deploy_config import DeployConfig
from stages.endpoint import ServerEndpoint
from stages.progress import Progress


class FakeServer:
    """Serves until it is stopped; keeps the time that its requests get to finish."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.drain_s: float | None = None

    def failure(self, *, patience_s: float) -> None:
        del patience_s

    def stop(self, *, drain_s: float) -> None:
        self.drain_s = drain_s


def test_server_that_should_end_while_another_loads_finishes_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: tmp_path / name for name in ("endpoint", "stop", "reload")}
    servers: list[FakeServer] = []

    @contextmanager
    def serving(*_: Any, check: Callable[[], None], **__: Any) -> Iterator[Any]:
        if servers:  # the one that should take over is still loading
            paths["stop"].touch()
        else:
            paths["reload"].touch()
        check()
        servers.append(FakeServer(tmp_path / "log"))
        yield servers[-1], ServerEndpoint("here", 1, 2, 3, "m", None, "7", 1, 1, "now")

    monkeypatch.setattr(service, "serving", serving)
    kept = service.Service(
        DeployConfig(tmp_path, "m", drain_s=17.0),
        tmp_path,
        Progress(),
        endpoint_path=paths["endpoint"],
        stop_path=paths["stop"],
        reload_path=paths["reload"],
        until=time.monotonic() + 600,
    )
    assert kept.run() == "no longer needed"
    assert [server.drain_s for server in servers] == [17.0]
    assert not paths["endpoint"].exists()
