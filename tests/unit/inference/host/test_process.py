"""A server follows its owner's orders."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inference.front.link import Question, Reload
from inference.host.process import ANSWERED, READY, _Host


class BusyContext:
    """The models of a server, of which a request never ends."""

    def __init__(self) -> None:
        self.current: Any = SimpleNamespace(models={}, advanced=lambda: 7)

    async def exchange(self, _: object) -> object:
        """Use another repository; the former one stays in use."""
        self.current = SimpleNamespace(models={}, advanced=lambda: 8)
        return await asyncio.Future[object]()


def test_questions_are_answered_while_a_request_keeps_the_former_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: Any = SimpleNamespace(triton=object(), openai=None, hidden=None)
    connection: Any = None
    host = _Host(settings, connection)
    told: list[tuple[str, str]] = []

    async def load(_: object) -> None:
        """Load nothing."""

    async def run() -> None:
        orders: asyncio.Queue[Question | Reload] = asyncio.Queue()
        link = SimpleNamespace(
            orders=orders, tell=lambda event, about="": told.append((event, about))
        )
        monkeypatch.setattr(host, "_link", link, raising=False)
        monkeypatch.setattr(host, "_context", BusyContext(), raising=False)
        monkeypatch.setattr(host, "_load", load)
        monkeypatch.setattr(host, "_repository", object)
        following = asyncio.create_task(host._follow())
        orders.put_nowait(Reload())
        while told.count((READY, "")) < 2:
            await asyncio.sleep(0)
        orders.put_nowait(Question(1))
        while told[-1][0] != ANSWERED:
            await asyncio.sleep(0)
        following.cancel()

    asyncio.run(asyncio.wait_for(run(), timeout=10))
    assert told[-1] == (ANSWERED, "1 8 ")
