"""The work of a step: prompt tokens and encoder layers within the time a step may take."""

from collections import deque
from collections.abc import Iterable, Sequence

from inference.engine.planned_step import Chunk, EncoderWork
from inference.engine.sequence import RunningSequence, SequenceStatus
from inference.engine.sequence_cache import SequenceCache

_LEAST = 16  # fewer would be too slow, even where these exceed the bound
_FIRST = 64  # before anything was measured
_MOST = 1024
# With no decode in flight, only cancellation latency and the rank timeout bound the chunk.
_ALONE_FACTOR = 4
# Most prompt tokens of a sequence in a step, for those that need the logits of all of them.
_MOST_LOGITS = 128


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


def prompt_chunks(
    sequences: Sequence[RunningSequence], budget: int, cache: SequenceCache
) -> list[Chunk]:
    """Return the next chunks of the prompts, about `budget` tokens of them.

    A step stores the keys of all its tokens before it uses any: its later sequences share what
    earlier ones compute. Up to half of the budget is for the oldest sequence. Those with the fewest
    missing tokens come first among the others: no short prompt waits for a long one, and no long
    one for ever.
    """
    chunks: list[Chunk] = []
    behind = {id(each.owner) for each in sequences if each.owner.lock_step and _missing(each) > 1}
    reserved = min(budget // 2, _missing(sequences[0])) if sequences else 0
    for sequence in [*sorted(sequences[1:], key=_missing), *sequences[:1]]:
        if sequence is sequences[0]:
            reserved = 0
        cache.shared_tokens += cache.share(sequence)  # computed since it began
        count = _count(sequence, budget - reserved, is_behind=id(sequence.owner) in behind)
        if count > 0:
            first, stop = sequence.table.cached, sequence.table.cached + count
            is_last = stop == sequence.prompt_len
            outputs = count if sequence.prompt_outputs.wants_logits else int(is_last)
            ids = sequence.prompt[first:stop]
            chunks.append(Chunk(sequence, sequence.slots[0], ids, outputs, is_last, first, True))
            budget -= count
            cache.register(sequence, stop)
    return chunks


def _count(sequence: RunningSequence, budget: int, *, is_behind: bool) -> int:
    """Return how many missing tokens of a prompt to compute, at most `budget`."""
    table, limit = sequence.table, sequence.prompt_len
    if sequence.owner.lock_step:
        # Sequences in lock step hold back their last token until all have reached it.
        limit, budget = (limit - 1, budget) if is_behind else (limit, max(budget, 1))
    count = min(budget, limit - table.cached)
    if table.memory_len is not None:
        # Later tokens see less of the beginning: in a full slot each token displaces another.
        count = min(count, max(table.memory_len - table.held, 1))
    if sequence.prompt_outputs.wants_logits:
        count = min(count, _MOST_LOGITS)
    return count


def _missing(sequence: RunningSequence) -> int:
    return sequence.prompt_len - sequence.table.cached


class EncoderProgress:
    """The batch in the encoder of an encoder-decoder; always empty for other models.

    One batch of sequences passes the encoder at a time. A step takes as many of its layers as fit
    in the time a step may take: an input of an encoder cannot be cut as the prompt of a decoder
    can. What is planned counts as done; the step that ends the pass may go on with the first tokens
    of its sequences.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._done = 0
        self._batch: list[RunningSequence] = []

    def plan(self, sequences: Iterable[RunningSequence], budget: int) -> EncoderWork:
        """Return the encoder's work of the next step; waiting `sequences` begin if it is empty.

        The whole pass of `budget` tokens fits in the time a step may take.
        """
        if self._layers and not self._batch:
            taken: list[RunningSequence] = []
            for sequence in sequences:
                if sequence.status is not SequenceStatus.ENCODE:
                    continue
                if taken and _tokens([*taken, sequence]) > budget:
                    break
                taken.append(sequence)
            # Inputs of similar length share an attention call.
            self._batch, self._done = sorted(taken, key=lambda each: each.encoder_len), 0
        if not self._batch:
            return EncoderWork()
        batch, begins = tuple(self._batch), not self._done
        share = self._layers * budget // _tokens(batch)
        layers = min(max(share, 1), self._layers - self._done)
        self._done += layers
        if self._done == self._layers:
            for sequence in batch:
                sequence.become(SequenceStatus.PREFILL)
            self._batch = []
        return EncoderWork(batch, layers, begins, tokens=_tokens(batch) * layers // self._layers)

    def drop(self, sequences: Iterable[RunningSequence]) -> None:
        """Drop sequences; a pass begins again without them, whose blocks are no longer theirs."""
        dropped = set(sequences)
        if not dropped.isdisjoint(self._batch):
            self._batch = [sequence for sequence in self._batch if sequence not in dropped]
            self._done = 0


def _tokens(sequences: Iterable[RunningSequence]) -> int:
    return sum(sequence.encoder_len for sequence in sequences)
