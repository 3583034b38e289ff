"""A server follows its owner's orders."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from inference.front.guard import RejectedError
from inference.front.link import CanaryTimes, Reload
from inference.host.hosted import UnservedError
from inference.host.process import _Host, serve_host


class BusyContext:
    """The models of a server, of which a request never ends."""

    def __init__(self) -> None:
        self.current: Any = SimpleNamespace(models={})

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Keep the models in use."""
        yield self.current

    async def exchange(self, _: object) -> object:
        """Use another repository; the former one stays in use."""
        self.current = SimpleNamespace(models={})
        return await asyncio.Future[object]()


def test_a_repository_is_reloaded_while_a_request_keeps_the_former_one(
    monkeypatch,
):
    async def load(_: object) -> None:
        """Load nothing."""

    async def run() -> None:
        host, events = host_that_loads(monkeypatch, load)
        host._link.reload = asyncio.Event()
        following = asyncio.create_task(host._load_and_follow())
        for count in (1, 2, 3):
            while events.count({"models": {}}) < count:
                await asyncio.sleep(0)
            host._link.order = Reload("there")
            host._link.reload.set()
        following.cancel()

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_server_is_not_ready_before_all_its_ports_answer(monkeypatch):
    async def load(_: object) -> None:
        """Load nothing."""

    host, _ = host_that_loads(monkeypatch, load)
    host._link.stopped = asyncio.Event()
    hosted: Any = SimpleNamespace(models={"m": object()}, endpoint=None)
    settings: Any = host._settings
    host._context.current = hosted
    assert host._is_ready()
    settings.openai = object()
    assert not host._is_ready()
    hosted.endpoint = object()
    assert host._is_ready()


def host_that_loads(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Awaitable[None]]
) -> tuple[_Host, list[dict[str, Any]]]:
    """Return a server whose models load by a function, and what it reports to its owner."""
    settings: Any = SimpleNamespace(triton=object(), openai=None, canaries=CanaryTimes())
    connection: Any = None
    host = _Host(settings, connection)
    events: list[dict[str, Any]] = []
    link = SimpleNamespace(send=lambda **news: events.append(news))
    monkeypatch.setattr(host, "_link", link, raising=False)
    monkeypatch.setattr(host, "_context", BusyContext(), raising=False)
    monkeypatch.setattr(host, "_load", load)

    async def close() -> None:
        """End nothing."""

    monkeypatch.setattr(host, "_repository", lambda _: SimpleNamespace(close=close, models={}))
    return host, events


def test_a_repository_that_is_kept_is_reported_with_words(monkeypatch):
    async def load(_: object) -> None:
        raise UnservedError([])

    host, events = host_that_loads(monkeypatch, load)
    asyncio.run(host._reload("there"))
    (event,) = events
    assert event["kept"]


def test_whatever_ends_a_start_is_told_to_the_owner(monkeypatch):
    async def load(_: object) -> None:
        raise RejectedError("the tokenizer takes too much memory")

    def leave(status: int) -> None:
        raise SystemExit(status)

    host, events = host_that_loads(monkeypatch, load)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        asyncio.run(host._load_and_follow())
    assert [[*event] for event in events] == [["failures"]]


def test_the_end_does_not_wait_for_a_thread_that_loads(monkeypatch):
    has_ended = threading.Event()
    waited = list[bool]()

    def load() -> None:
        waited.append(has_ended.wait(3))

    async def serve(_: object) -> int:
        loading = asyncio.create_task(asyncio.to_thread(load))
        await asyncio.sleep(0.1)
        assert not loading.done()
        return 3

    def leave(status: int) -> None:
        has_ended.set()
        raise SystemExit(status)

    monkeypatch.setattr(_Host, "serve", serve)
    monkeypatch.setattr(os, "_exit", leave)
    nothing: Any = None
    with pytest.raises(SystemExit, match="3"):
        serve_host(nothing, nothing)
    assert waited == [True]
