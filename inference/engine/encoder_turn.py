"""Which rows are in the encoder, and how many of its layers they go through in a step.

One batch of rows at a time passes the encoder. A step takes as many layers of it as keep to the
time a step may take, since rows of an encoder cannot be cut as prompts of a decoder can.
"""

from __future__ import annotations

from collections.abc import Iterable

from inference.engine.planned_step import EncoderWork
from inference.engine.running import RunningRequest, RunningRow


class EncoderTurn:
    """The batch in the encoder of an encoder-decoder; always empty for other models."""

    def __init__(self, layers: int) -> None:
        """Start empty; `layers` is the encoder's depth."""
        self._layers = layers
        self._done = 0
        self._rows: list[RunningRow] = []

    def plan(self, rows: Iterable[RunningRow], room: int) -> EncoderWork:
        """Return what the encoder does in the next step; waiting rows begin if none are in it.

        Args:
            rows: All that hold lanes.
            room: Tokens whose whole pass fits in the time a step may take.
        """
        if not self._layers:
            return EncoderWork()
        if not self._rows:
            self._rows = _take(rows, room)
            self._done = 0
        if not self._rows:
            return EncoderWork()
        share = self._layers * room // _tokens(self._rows)
        layers = min(max(share, 1), self._layers - self._done)
        return EncoderWork(
            rows=tuple(self._rows),
            layers=layers,
            begins=not self._done,
            ends=self._done + layers == self._layers,
            tokens=_tokens(self._rows) * layers // self._layers,
        )

    def finish(self, work: EncoderWork) -> None:
        """Note that a planned step has run."""
        self._done += work.layers
        if work.ends:
            for row in self._rows:
                row.is_encoded = True
            self._rows = []

    def drop(self, request: RunningRequest) -> None:
        """Forget the rows of a request; the others go on."""
        self._rows = [row for row in self._rows if row.owner is not request]


def _tokens(rows: Iterable[RunningRow]) -> int:
    return sum(len(row.encoder_ids or ()) for row in rows)


def _take(rows: Iterable[RunningRow], room: int) -> list[RunningRow]:
    """Return rows that wait for the encoder, of at most `room` tokens; at least one if any do."""
    taken: list[RunningRow] = []
    for row in rows:
        if row.is_encoded:
            continue
        if taken and _tokens([*taken, row]) > room:
            break
        taken.append(row)
    # Rows of like length share an attention call.
    return sorted(taken, key=lambda row: len(row.encoder_ids or ()))
