"""The work of a step: as many prompt tokens and encoder layers as its time budget allows."""

from collections import deque
from collections.abc import Iterable, Sequence

from inference.engine.planned_step import Chunk, EncoderWork
from inference.engine.sequence import RunningSequence, SequenceStatus
from inference.engine.sequence_cache import SequenceCache

_MIN_TOKENS = 16  # even if these exceed the time budget: fewer would be too slow
_INITIAL_TOKENS = 64  # before anything was measured
_MAX_TOKENS = 1024
# While no sequence decodes, only cancellation latency and the rank timeout bound a chunk.
_PREFILL_ONLY_FACTOR = 4
# Most prompt tokens of a sequence in a step, if the logits of all of them are needed.
_MAX_LOGITS = 128


class ChunkSize:
    """Budget of prompt tokens that keeps steps near `bound_s`, by the speed of the last steps.

    It takes their median, as a single slow step (such as the first of its size) predicts nothing.
    """

    def __init__(
        self, bound_s: float, *, first: int = _INITIAL_TOKENS, most: int = _MAX_TOKENS
    ) -> None:
        """Start with `first` tokens until a step was measured; never exceed `most`."""
        self._bound_s, self._first, self._most = bound_s, first, most
        self._token_s: deque[float] = deque(maxlen=3)

    def tokens(self, *, with_decodes: bool) -> int:
        """Return the most prompt tokens of the next step, in which sequences may also decode."""
        factor = 1 if with_decodes else _PREFILL_ONLY_FACTOR
        if not self._token_s:
            return factor * self._first
        token_s = sorted(self._token_s)[(len(self._token_s) - 1) // 2]
        return int(min(max(factor * self._bound_s / token_s, _MIN_TOKENS), self._most))

    def observe(self, *, tokens: int, seconds: float) -> None:
        """Record the prompt tokens and the duration of a step."""
        if tokens >= _MIN_TOKENS:
            self._token_s.append(seconds / tokens)


def prompt_chunks(
    sequences: Sequence[RunningSequence], budget: int, cache: SequenceCache
) -> list[Chunk]:
    """Return the next chunks of the prompts, about `budget` tokens in all.

    A step stores the keys of all its tokens before it reads any, so that later sequences of a step
    share what earlier ones compute. Up to half of the budget is reserved for the oldest sequence;
    the others follow in order of remaining tokens. No short prompt waits for a long one, and long
    ones always advance.
    """
    chunks: list[Chunk] = []
    behind = {id(each.owner) for each in sequences if each.owner.lock_step and _remaining(each) > 1}
    reserved = min(budget // 2, _remaining(sequences[0])) if sequences else 0
    for sequence in [*sorted(sequences[1:], key=_remaining), *sequences[:1]]:
        if sequence is sequences[0]:
            reserved = 0
        cache.shared_tokens += cache.share(sequence)  # blocks computed since it got its slot
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
    """Return how many remaining tokens of a prompt to compute, at most `budget`."""
    table, limit = sequence.table, sequence.prompt_len
    if sequence.owner.lock_step:
        # In lock step, sequences hold back their last token until all have reached it.
        limit, budget = (limit - 1, budget) if is_behind else (limit, max(budget, 1))
    count = min(budget, limit - table.cached)
    if table.memory_len is not None:
        # In a full slot each token displaces the oldest one, so they are computed one by one.
        count = min(count, max(table.memory_len - table.held, 1))
    if sequence.prompt_outputs.wants_logits:
        count = min(count, _MAX_LOGITS)
    return count


def _remaining(sequence: RunningSequence) -> int:
    return sequence.prompt_len - sequence.table.cached


class EncoderProgress:
    """The batch in the encoder of an encoder-decoder; always empty for other models.

    One batch of sequences passes the encoder at a time. Since its inputs cannot be divided into
    chunks, a step runs as many layers as its time budget allows. Planned layers count as done: the
    step that ends a pass may already decode its sequences' first tokens.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._done = 0
        self._batch: list[RunningSequence] = []

    def plan(self, sequences: Iterable[RunningSequence], budget: int) -> EncoderWork:
        """Return the encoder's work of the next step, with a new batch if the encoder is empty.

        `budget` is the number of tokens whose whole pass fits into the time budget of a step.
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
        """Drop sequences, whose blocks are freed; the others start their pass again."""
        dropped = set(sequences)
        if not dropped.isdisjoint(self._batch):
            self._batch = [sequence for sequence in self._batch if sequence not in dropped]
            self._done = 0


def _tokens(sequences: Iterable[RunningSequence]) -> int:
    return sum(sequence.encoder_len for sequence in sequences)
