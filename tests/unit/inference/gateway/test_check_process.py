"""Checks of large requests: other requests go on, and a lost process is replaced."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from inference.gateway.check_process import CheckProcess
from inference.gateway.validation import MalformedError, check_json
from inference.server.supervisor import descendants

LARGE = b'{"a":[' + b",".join([b"{}"] * 1_000_000) + b"]}"  # takes about a second


def end_the_process(data: bytes) -> None:
    assert data
    os.kill(os.getpid(), signal.SIGKILL)


def test_others_are_answered_while_a_large_request_is_checked() -> None:
    async def turns_of_others() -> int:
        checks, turns = CheckProcess(), 0
        task = asyncio.ensure_future(checks.run(check_json, LARGE))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        await task
        checks.close()
        return turns

    assert asyncio.run(turns_of_others()) > 10  # 1 where it holds them up


def test_reason_comes_back_and_the_process_ends_with_the_gateway() -> None:
    before = set(descendants(os.getpid()))

    async def check() -> None:
        checks = CheckProcess()
        with pytest.raises(MalformedError, match="not an object"):
            await checks.run(check_json, b"[1]")  # here
        assert set(descendants(os.getpid())) == before
        with pytest.raises(MalformedError, match="not an object"):
            await checks.run(check_json, b"[" + b"1," * 100_000 + b"1]")
        with pytest.raises(MalformedError, match="too much memory"):
            await checks.run(end_the_process, LARGE)
        await checks.run(check_json, LARGE)
        checks.close()

    asyncio.run(check())
