"""Streams that are cancelled at the same moment."""

from __future__ import annotations

import asyncio
import itertools
import time

from inference.front.upstream import Cancellations


class Stream:
    cancelled_at: float | None = None

    def cancel(self) -> None:
        self.cancelled_at = time.monotonic()


def test_streams_are_cancelled_in_order_with_pauses() -> None:
    streams = [Stream() for _ in range(5)]

    async def leave() -> None:
        cancellations = Cancellations()
        for stream in streams:
            cancellations.add(stream)
        while streams[-1].cancelled_at is None:
            await asyncio.sleep(0)

    asyncio.run(leave())
    times = [stream.cancelled_at or 0.0 for stream in streams]
    assert all(later - earlier > 0.01 for earlier, later in itertools.pairwise(times))
