"""Requests to an engine in a process of its own: answers, errors, ends."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from inference.backend.arguments import ModelArguments
from inference.backend.requests import TOKENS, InferRequest, ModelError
from inference.host import engines
from inference.host.engine_process import MAX_UNREAD, LoadOrder
from inference.host.engines import EngineProcess
from tests.unit.inference.host.engine_models import Scripted

LIMIT_S = 60.0
Use = Callable[[EngineProcess, list[str]], Coroutine[Any, Any, None]]
Shared = Callable[[Use], None]


def asked(does: str, **more: Any) -> InferRequest:
    return InferRequest({"do": np.array([does.encode()], object)}, **more)


async def answers(engine: EngineProcess, request: InferRequest, **more: Any) -> list[Any]:
    found: list[Any] = []
    async for outputs, final in engine.infer(request, **more):
        grows = TOKENS in outputs
        found.append(({TOKENS: [[*i] for i in outputs[TOKENS]]} if grows else outputs, final))
    return found


@asynccontextmanager
async def loaded(**parameters: str) -> AsyncIterator[tuple[EngineProcess, list[str]]]:
    """Yield a loaded engine, and the reasons for which it is lost."""
    given = {key: {"string_value": value} for key, value in parameters.items()}
    lost: list[str] = []
    engine = EngineProcess(Path("/there/m"), lost.append)
    try:
        arguments = ModelArguments({"name": "m", "parameters": given}, "/there/m")
        await engine.load(LoadOrder(Scripted, arguments))
        yield engine, lost
    finally:
        await engine.close()


def with_engine(use: Use, **parameters: str) -> None:
    """Run `use` with an engine of its own."""

    async def main() -> None:
        async with loaded(**parameters) as (engine, lost):
            await use(engine, lost)

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.fixture(scope="module")
def with_shared() -> Iterator[Shared]:
    """Return what runs its argument with an engine that the tests share."""
    with asyncio.Runner() as runner:
        context = loaded(a="b")
        engine, lost = runner.run(context.__aenter__())
        yield lambda use: runner.run(asyncio.wait_for(use(engine, lost), LIMIT_S))
        runner.run(context.__aexit__(None, None, None))


def test_outputs_come_without_torch_and_tokens_as_they_grow(with_shared):
    async def use(engine: EngineProcess, lost: list[str]) -> None:
        (half, first), (text, last) = await answers(engine, asked("tensors"))
        assert (first, last, engine.steps) == (False, True, 7)
        assert (half["half"].dtype, half["half"].tolist()) == (bfloat16, [1.0, 1.0])
        assert half["whole"].tolist() == [0, 1]
        assert (text["text"].tolist(), text["said"].tolist()) == ([b"a"], [1])
        waited: list[float] = []
        *_, (found, final) = await answers(engine, asked("tokens"), queued=waited.append)
        assert found == {TOKENS: [[1, 3, 4], [2, 5, 6, 7]]}
        assert (final, waited, lost) == (True, [0.5], [])

    with_shared(use)


def test_steps_that_are_taken_at_once_are_the_tokens_so_far(with_shared):
    async def use(engine: EngineProcess, _: list[str]) -> None:
        found = await answers(engine, asked("tokens"))
        states = [[[1], [2]], [[1, 3], [2]], [[1, 3, 4], [2, 5, 6]], [[1, 3, 4], [2, 5, 6, 7]]]
        seen = [each[TOKENS] for each, _ in found]
        assert seen == [each for each in states if each in seen]
        assert seen[-1] == states[-1]

    with_shared(use)


def test_what_came_while_the_loop_was_busy_is_one_frame(monkeypatch):
    here, there = Pipe()
    process = SimpleNamespace(link=here, wait=lambda _=None: 0, kill=lambda: None)
    monkeypatch.setattr(engines, "started_engine", lambda _: process)

    async def main() -> list[Any]:
        engine = EngineProcess(Path("/there/m"), print)
        asking = asyncio.create_task(answers(engine, asked("tokens")))
        number, _ = pickle.loads(await asyncio.to_thread(there.recv_bytes))
        for step in range(3):
            there.send_bytes(pickle.dumps((step, [(number, ({TOKENS: [[step]]}, False, 0.0))])))
        there.send_bytes(pickle.dumps((3, [(number, ({TOKENS: [[0, 1, 2]]}, True, 0.0))])))
        found = await asking
        await engine.close()
        return found

    seen = asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    assert [outputs[TOKENS] for outputs, _ in seen] == [[[0, 1, 2]]] * len(seen)
    assert len(seen) <= 2


def test_tensors_that_nobody_reads_are_not_made(with_shared):
    async def use(engine: EngineProcess, lost: list[str]) -> None:
        responses = engine.infer(asked("flood"))
        steps = [int((await anext(responses))[0]["step"][0])]
        for _ in range(20):
            await answers(engine, asked("tokens"))
        assert engine.steps <= MAX_UNREAD + 1
        steps += [int(outputs["step"][0]) async for outputs, _ in responses]
        assert steps == [*range(1000)]
        assert not lost

    with_shared(use)


@pytest.mark.parametrize(
    ("does", "answer"),
    [("refuse", ("too busy", "UNAVAILABLE")), ("fault", ("'a fault'", "INTERNAL"))],
)
def test_a_refusal_is_that_of_its_request_alone(does, answer, with_shared):
    async def use(engine: EngineProcess, lost: list[str]) -> None:
        other = asyncio.create_task(answers(engine, asked("tokens")))
        with pytest.raises(ModelError) as caught:
            await answers(engine, asked(does))
        assert (str(caught.value), caught.value.code) == answer
        assert await other
        assert not lost

    with_shared(use)


def test_a_request_that_is_given_up_is_cancelled_there(with_shared):
    async def use(engine: EngineProcess, _: list[str]) -> None:
        async def cancelled() -> float:
            found = {(e.row.name, e.labels.get("outcome")): e.value for e in await engine.metrics()}
            return found["slipway_requests_total", "cancelled"]

        before = await cancelled()
        asking = asyncio.create_task(answers(engine, asked("wait")))
        await asyncio.sleep(0)  # it is sent
        await answers(engine, asked("tokens"))  # and has begun
        asking.cancel()
        await asyncio.wait([asking])
        while await cancelled() == before:
            pass

    with_shared(use)


@pytest.mark.parametrize(
    ("does", "reason"),
    [("end", "its process has ended with status 3"), ("leave", "a rank is gone")],
)
def test_a_lost_engine_fails_its_requests_with_the_reason(does, reason):
    async def use(engine: EngineProcess, lost: list[str]) -> None:
        waiting = asyncio.create_task(answers(engine, asked("wait")))
        with pytest.raises(ModelError) as caught:
            await answers(engine, asked(does))
        assert caught.value.code == "UNAVAILABLE"
        with pytest.raises(ModelError):
            await waiting
        assert lost == [f"m is out of service: {reason}"]

    with_engine(use)


def test_a_model_that_cannot_be_loaded_says_why():
    async def use(_: EngineProcess, __: list[str]) -> None:
        raise AssertionError("it is loaded")

    with pytest.raises(ValueError, match="its weights are \ufffd none"):
        with_engine(use, refuse="1")


def test_a_closed_engine_leaves_no_process(with_shared):
    """The last test of the shared engine."""

    async def use(engine: EngineProcess, lost: list[str]) -> None:
        await engine.close()
        with pytest.raises(ModelError):
            await answers(engine, asked("tokens"))
        assert not lost

    with_shared(use)
