"""The growing answer of a sequence, and the rules that it applies to logits."""

from collections.abc import Sequence

import numpy as np

from inference.decoding.draws import NO_IDS, Penalty, TokenMarks, biases, prompt_ids
from inference.decoding.rows import PromptResult, SequenceRequest
from inference.decoding.word_lists import TokenIds, banned_ids

UNUSABLE = "the model computed logits that are not finite; no token can be chosen"
EXCLUDED = "every token that can follow in the requested grammar is banned"


class GrowingAnswer:
    """The answer of one sequence, from its first token to its result.

    Attributes:
        slots: Rows of logits that a step reads, one for each beam.
        tokens: The newest token of each slot.
        parents: The slot whose cache each slot continues, once there are tokens.
        prompt: The outputs of the prompt.
        error: The reason why no token could be chosen, which finishes the answer.
        rank_chooses: Whether a rank can choose its tokens.
        needs_norm: Whether a step needs the softmax sum over the vocabulary.
        is_plain: Whether a step takes the arg-max of the raw logits.
    """

    slots = 1
    rank_chooses = False
    needs_norm = True

    def __init__(self, request: SequenceRequest, *, vocab_size: int) -> None:
        self.request, self.options = request, request.options
        self.tokens: TokenIds = ()
        self.parents: Sequence[int] = range(self.slots)
        self.prompt = PromptResult()
        self.error: str | None = None
        self._vocab_size = vocab_size
        penalised = request.context_ids if self.options.is_penalised else ()
        self._prompt_ids = prompt_ids(penalised, vocab_size)

    def fail(self) -> None:
        """Finish the answer: its logits are unusable, or its request excludes every token."""
        self.error, constraint = UNUSABLE, self.request.constraint
        if constraint is not None:
            allowed = np.unpackbits(constraint.mask(), bitorder="little").nonzero()[0]
            is_banned = {word[-1] for word in self.options.bad_words}.issuperset(allowed.tolist())
            self.error = constraint.problem or (EXCLUDED if is_banned else UNUSABLE)

    def penalty(self, generated: int) -> Penalty:
        """Return the penalty for the token after `generated` tokens of the answer."""
        o = self.options
        # As in FasterTransformer, a single token of context is not penalised yet.
        if not o.is_penalised or self.request.context_len + generated <= 1:
            return Penalty(1, 0, o.frequency_penalty)
        return Penalty(o.repetition_penalty, o.presence_penalty, o.frequency_penalty)

    def _marks(self, answer: Sequence[int], newest: Sequence[int]) -> TokenMarks:
        """Return the marks after an answer's tokens; `newest` are the last of prompt and answer."""
        o = self.options
        seen = NO_IDS
        if o.is_penalised:
            seen = np.concatenate((self._prompt_ids, np.asarray(answer, np.int64)))
        ids, bias = biases(o, answer)
        if banned := banned_ids(newest, o.bad_words, self._vocab_size):
            ids = np.concatenate((ids, np.asarray(banned, np.int64)))
            bias = np.concatenate((bias, np.full(len(banned), -np.inf, np.float32)))
        return TokenMarks(seen, ids, bias)

    def forbidden_ids(self, generated: int) -> TokenIds:
        """Return the end ids while the answer is shorter than `min_length`."""
        if generated >= self.options.min_length:
            return ()
        return tuple(token for token in self.options.end_ids if 0 <= token < self._vocab_size)
