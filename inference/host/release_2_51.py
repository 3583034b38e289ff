"""Workarounds for tritonserver 2.51, the release in NVIDIA's PyTriton; later ones need none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

# It may corrupt its memory when many streams are cancelled at the same moment.
_CANCEL_PAUSE_S = 0.02
# It stops a request's clock when the Python backend takes the request, long before the answer. The
# host counts these families of metrics itself.
_OWN_METRICS = ("nv_inference_", "# HELP nv_inference_", "# TYPE nv_inference_")


class Cancellations:
    """Cancels calls one at a time, with pauses."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, call: Any) -> None:
        """Schedule the cancellation of a call, after earlier ones; returns at once."""
        task = asyncio.create_task(self._cancel(call))
        self._tasks.add(task)  # the event loop holds no strong reference
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, call: Any) -> None:
        async with self._turn:
            if call.cancel():  # it had not ended
                await asyncio.sleep(_CANCEL_PAUSE_S)


def is_crash(status: int | None) -> bool:
    """Return whether a start was ended by a signal: one in a hundred is, and the next succeeds."""
    return status is not None and status > 128


def without_its_clocks(lines: Iterable[str]) -> list[str]:
    """Return lines of metrics without those that its clocks falsify."""
    return [line for line in lines if not line.startswith(_OWN_METRICS)]
