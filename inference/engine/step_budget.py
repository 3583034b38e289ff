"""The work of a step: prompt tokens and encoder layers within the time a step may take."""

from collections import deque
from collections.abc import Iterable, Sequence

from inference.engine.planned_step import EncoderWork, RowWork
from inference.engine.row_cache import RowCache
from inference.engine.running import RunningRow

_LEAST = 16  # fewer would be too slow; on slow devices even these may exceed the bound
_FIRST = 64  # before anything was measured
_MOST = 1024
# With no decode in flight, only cancellation latency and the rank timeout bound the chunk.
_ALONE_FACTOR = 4
# Most prompt tokens of a row in a step, for rows that need the logits of all of them.
_MOST_LOGITS = 128
_ONE = range(1)


class ChunkSize:
    """Budget of prompt tokens that keeps steps near `bound_s`, by the speed of the last few.

    Their median counts: a single slow step, such as the first of its size, does not predict the
    next ones.
    """

    def __init__(self, bound_s: float, *, first: int = _FIRST, most: int = _MOST) -> None:
        """Start with `first` tokens, before anything was measured; never exceed `most`."""
        self._bound_s, self._first, self._most = bound_s, first, most
        self._token_s: deque[float] = deque(maxlen=3)

    def tokens(self, *, somebody_waits: bool) -> int:
        """Return how many prompt tokens the next step may take."""
        if not self._token_s:
            return self._first if somebody_waits else _ALONE_FACTOR * self._first
        bound_s = self._bound_s if somebody_waits else _ALONE_FACTOR * self._bound_s
        token_s = sorted(self._token_s)[(len(self._token_s) - 1) // 2]
        return int(min(max(bound_s / token_s, _LEAST), self._most))

    def observe(self, *, tokens: int, seconds: float) -> None:
        """Record the prompt tokens and the duration of a step."""
        if tokens >= _LEAST:
            self._token_s.append(seconds / tokens)


def decoding_work(row: RunningRow) -> list[RowWork]:
    """Return the next token of each slot of a row that decodes."""
    if len(row.slots) == 1:
        return [RowWork(row, row.slots[0], list(row.next_ids), _ONE, True, row.cached, False)]
    return [
        RowWork(row, slot, [token], _ONE, True, row.cached, False)
        for slot, token in zip(row.slots, row.next_ids, strict=True)
    ]


def prompt_work(rows: Sequence[RunningRow], budget: int, cache: RowCache) -> list[RowWork]:
    """Return the next chunks of the prompts, about `budget` tokens of them.

    A step stores the keys of all its tokens before it uses any: its later rows share what earlier
    ones compute. Up to half of the budget is for the oldest row. The rows with the fewest missing
    tokens come first among the others: no short prompt waits for a long one, and no long one for
    ever.
    """
    work: list[RowWork] = []
    behind = {id(row.owner) for row in rows if row.owner.lock_step and _missing(row) > 1}
    reserved = min(budget // 2, _missing(rows[0])) if rows else 0
    for row in [*sorted(rows[1:], key=_missing), *rows[:1]]:
        if row is rows[0]:
            reserved = 0
        cache.shared_tokens += cache.share(row)  # computed since it began
        piece = _piece(row, budget - reserved, fellows_are_behind=id(row.owner) in behind)
        if piece is not None:
            work.append(piece)
            budget -= len(piece.ids)
            cache.register(row, row.cached + len(piece.ids))
    return work


def _piece(row: RunningRow, budget: int, *, fellows_are_behind: bool) -> RowWork | None:
    """Return a chunk of at most `budget` missing tokens of a row's prompt, None for no tokens."""
    limit = row.prompt_len
    if row.owner.lock_step:
        # Rows in lock step hold back their last token until all have reached it.
        limit, budget = (limit - 1, budget) if fellows_are_behind else (limit, max(budget, 1))
    count = min(budget, limit - row.cached)
    if row.memory_len is not None:
        # Later tokens see less of the beginning: in a full slot each token displaces another.
        count = min(count, max(row.memory_len - row.held, 1))
    if row.prompt_outputs.wants_logits:
        count = min(count, _MOST_LOGITS)
    if count <= 0:
        return None
    ids = row.prompt[row.cached : row.cached + count]
    last = row.cached + count == row.prompt_len
    outputs = range(count - 1 if last else count, count)
    if row.prompt_outputs.wants_logits:
        outputs = range(count)
    return RowWork(row, row.slots[0], ids, outputs, samples=last, first=row.cached, is_prompt=True)


def _missing(row: RunningRow) -> int:
    return row.prompt_len - row.cached


class EncoderProgress:
    """The batch in the encoder of an encoder-decoder; always empty for other models.

    One batch of rows passes the encoder at a time. A step takes as many of its layers as fit in the
    time a step may take: a row of an encoder cannot be cut as the prompt of a decoder can. What is
    planned counts as done; the step that ends the pass may go on with the rows' first tokens.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._done = 0
        self._rows: list[RunningRow] = []

    def plan(self, rows: Iterable[RunningRow], budget: int) -> EncoderWork:
        """Return the encoder's work of the next step; waiting `rows` begin if it is empty.

        The whole pass of `budget` tokens fits in the time a step may take.
        """
        if self._layers and not self._rows:
            taken: list[RunningRow] = []
            for row in rows:
                if row.is_encoded:
                    continue
                if taken and _tokens([*taken, row]) > budget:
                    break
                taken.append(row)
            # Rows of similar length share an attention call.
            self._rows, self._done = sorted(taken, key=lambda row: row.encoder_len), 0
        if not self._rows:
            return EncoderWork()
        rows, begins = tuple(self._rows), not self._done
        share = self._layers * budget // _tokens(rows)
        layers = min(max(share, 1), self._layers - self._done)
        self._done += layers
        if self._done == self._layers:
            for row in rows:
                row.is_encoded = True
            self._rows = []
        return EncoderWork(rows, layers, begins, tokens=_tokens(rows) * layers // self._layers)

    def drop(self, rows: Iterable[RunningRow]) -> None:
        """Drop rows; a pass begins again without them, whose blocks are no longer theirs."""
        dropped = set(rows)
        if not dropped.isdisjoint(self._rows):
            self._rows = [row for row in self._rows if row not in dropped]
            self._done = 0


def _tokens(rows: Iterable[RunningRow]) -> int:
    return sum(row.encoder_len for row in rows)
