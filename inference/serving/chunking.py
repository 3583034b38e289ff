"""Which prompt tokens a step takes, so that running requests wait no longer than stated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inference.serving.planned_step import RowWork
from inference.serving.running import RunningRow

_LEAST = 16  # fewer would make prompts crawl; this many may exceed the bound on slow devices
_MOST = 1024
_FIRST = 64  # before anything was measured
# With nobody decoding only cancels and other ranks' patience limit a step.
_ALONE_FACTOR = 4
# Prompt tokens of one row whose logits are kept at a time, for rows that want all of them.
_MOST_LOGITS = 128


class ChunkSize:
    """Keeps steps with prompt tokens near `bound_s`, by the speed of the last few.

    Their median counts: a step that once took long, as the first of its size may, says nothing of
    the next ones.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._token_s: deque[float] = deque(maxlen=3)

    def tokens(self, *, somebody_waits: bool) -> int:
        """Return how many prompt tokens the next step may take."""
        if not self._token_s:
            return _FIRST if somebody_waits else _ALONE_FACTOR * _FIRST
        bound_s = self._bound_s if somebody_waits else _ALONE_FACTOR * self._bound_s
        token_s = sorted(self._token_s)[(len(self._token_s) - 1) // 2]
        return int(min(max(bound_s / token_s, _LEAST), _MOST))

    def observe(self, *, tokens: int, seconds: float) -> None:
        """Learn from a step that took so many prompt tokens and seconds."""
        if tokens >= _LEAST:
            self._token_s.append(seconds / tokens)


def prompt_work(rows: Sequence[RunningRow], room: int) -> list[RowWork]:
    """Return the next pieces of prompts that are not computed yet, about `room` tokens of them."""
    work: list[RowWork] = []
    held = {id(row.owner) for row in rows if row.owner.lock_step and _has_more(row)}
    for row in rows:
        # Rows in lock step keep their last token until all have come so far.
        limit = row.prompt_len - (1 if row.owner.lock_step else 0)
        if row.owner.lock_step and id(row.owner) not in held:
            limit = row.prompt_len
            room = max(room, 1)  # all of them take their last one in the same step
        count = min(room, limit - row.cached)
        if row.wants_prompt_logits:
            count = min(count, _MOST_LOGITS)
        if count <= 0:
            continue
        ids = row.prompt[row.cached : row.cached + count]
        last = row.cached + count == row.prompt_len and row.handle is not None
        outputs = range(count - 1 if last else count, count)
        if row.wants_prompt_logits:
            outputs = range(count)
        work.append(RowWork(row, row.lanes[0], ids, outputs, samples=last))
        room -= count
    return work


def _has_more(row: RunningRow) -> bool:
    """Whether a row has prompt tokens before its last one to compute."""
    return row.cached < row.prompt_len - 1
