"""Work in separate processes: other requests are answered, and a lost process is replaced."""

import asyncio
import itertools
import os
import signal

import pytest

from inference.front.guard import RejectedError
from inference.front.validation import check_index
from inference.front.workers import INLINE_BYTES, MEMORY_BYTES, QUICK_BYTES, Workers
from inference.server.processes import descendants

LARGE = b'{"a":[' + b",".join([b"{}"] * 1_000_000) + b"]}"  # takes about a second


def end_the_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_for_ever() -> None:
    for _ in itertools.count():
        pass


def take_all_memory() -> int:
    return len(bytes(MEMORY_BYTES))


def do_nothing() -> None:
    pass


def process_id() -> int:
    return os.getpid()


def test_others_are_answered_while_a_large_request_is_checked():
    async def turns_of_others() -> int:
        workers, turns = Workers(), 0
        task = asyncio.ensure_future(workers.check(check_index, LARGE, size_bytes=len(LARGE)))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.001)
        await task
        workers.close()
        return turns

    assert asyncio.run(turns_of_others()) > 10  # 1 where it holds them up


def test_reasons_come_back_and_small_requests_need_no_process():
    before = set(descendants(os.getpid()))

    async def check() -> None:
        workers = Workers()
        for body in (b"[1]", b"[" + b"1," * INLINE_BYTES + b"1]"):
            with pytest.raises(RejectedError, match="not an object"):
                await workers.check(check_index, body, size_bytes=len(body))
            assert (set(descendants(os.getpid())) == before) == (len(body) <= INLINE_BYTES)
        workers.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (end_the_process, "too much memory"),
        (take_all_memory, "too much memory"),
        (run_for_ever, "more than 3 s"),
    ],
)
def test_work_without_an_end_is_ended_and_the_next_is_done(work, said):
    async def check() -> None:
        workers = Workers(1, work_s=3.0)
        with pytest.raises(RejectedError, match=said):
            await workers.run(work, size_bytes=0)
        assert await workers.run(process_id, size_bytes=0) != os.getpid()
        workers.close()

    asyncio.run(check())


def test_large_work_without_an_end_leaves_small_requests_a_process():
    async def check() -> None:
        workers = Workers(2, work_s=8.0)
        await workers.start(do_nothing)
        works = [workers.run(run_for_ever, size_bytes=QUICK_BYTES + 1) for _ in range(6)]
        endless = [asyncio.ensure_future(each) for each in works]
        await asyncio.sleep(0.1)
        await workers.run(process_id, size_bytes=0)
        assert not any(each.done() for each in endless)  # of which none makes way in time
        for each in endless:
            each.cancel()
        await asyncio.wait(endless)
        workers.close()

    asyncio.run(check())
