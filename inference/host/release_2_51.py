"""Workarounds for tritonserver 2.51, the release of NVIDIA's PyTriton; later ones need none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

# It is apt to corrupt its memory when many streams are cancelled at the same moment.
_CANCEL_PAUSE_S = 0.02
# It stops the clock of a request when the Python backend has taken it over, long before the answer:
# these families of metrics this process counts itself.
_OWN_METRICS = ("nv_inference_", "# HELP nv_inference_", "# TYPE nv_inference_")


class Cancellations:
    """Cancels calls one after the other, with pauses."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, call: Any) -> None:
        """Cancel a call soon, after those before it; returns at once."""
        task = asyncio.create_task(self._cancel(call))
        self._tasks.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, call: Any) -> None:
        async with self._turn:
            if call.cancel():  # it had not ended
                await asyncio.sleep(_CANCEL_PAUSE_S)


def is_crash(status: int | None) -> bool:
    """Return whether a signal has ended a start, as once in some hundred; the next one succeeds."""
    return status is not None and status > 128


def without_its_clocks(lines: Iterable[str]) -> list[str]:
    """Return lines of metrics without those that its clocks make wrong."""
    return [line for line in lines if not line.startswith(_OWN_METRICS)]
