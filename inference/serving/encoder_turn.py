"""Which rows are in the encoder, and how many of its layers they go through in a step.

One batch of rows at a time passes the encoder. A step takes as many layers of it as keep to the
time a step may take, since rows of an encoder cannot be cut as prompts of a decoder can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference.serving.running import RunningRequest, RunningRow


class EncoderTurn:
    """The batch in the encoder of an encoder-decoder; always empty for other models."""

    def __init__(self, layers: int) -> None:
        """Start empty; `layers` is the encoder's depth."""
        self._layers = layers
        self._done = 0
        self.rows: list[RunningRow] = []

    def plan(self, rows: Iterable[RunningRow], room: int) -> int:
        """Return how many layers the next step runs; a batch of waiting rows begins if none is.

        Args:
            rows: All that hold lanes.
            room: Tokens whose whole pass fits in the time a step may take.
        """
        if not self.rows:
            self.rows = _take(rows, room)
            self._done = 0
        if not self.rows:
            return 0
        share = self._layers * room // _tokens(self.rows)
        return min(max(share, 1), self._layers - self._done)

    def beginning(self, layers: int) -> Sequence[RunningRow]:
        """Return the rows whose pass begins with a step of so many layers."""
        return self.rows if layers and not self._done else []

    def ending(self, layers: int) -> Sequence[RunningRow]:
        """Return the rows whose pass ends with a step of so many layers."""
        return self.rows if layers and self._done + layers == self._layers else []

    def tokens(self, layers: int) -> int:
        """Return how many tokens' whole pass a step of so many layers is worth."""
        return _tokens(self.rows) * layers // self._layers if layers else 0

    def finish(self, layers: int) -> None:
        """Note that a step of so many layers has run."""
        for row in (ended := self.ending(layers)):
            row.is_encoded = True
        self._done += layers
        if ended:
            self.rows = []

    def drop(self, request: RunningRequest) -> None:
        """Forget the rows of a request; the others go on."""
        self.rows = [row for row in self.rows if row.owner is not request]


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
