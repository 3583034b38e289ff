"""Outputs that a row gathers while its prompt is computed, chunk by chunk."""

# Shapes: n prompt tokens of a chunk, V vocabulary, E hidden

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.decoding.options import RowOptions
from inference.decoding.processors import context_log_prob, token_scores
from inference.decoding.rows import PromptScores, TokenScore


class PromptOutputs:
    """The outputs of one row's prompt.

    Nothing is read before `commit`, which follows the last chunk. A row that is preempted computes
    its prompt again: earlier, `restart` drops what was gathered; later, nothing is gathered twice.

    Attributes:
        keeps_logits: Whether the logits themselves are the request's answer.
        wants_logits: Whether the logits of every prompt token are needed.
        wants_pooled: Whether the sum of the prompt's hidden states is needed.
        is_final: Whether the whole prompt has been computed.
    """

    def __init__(self, options: RowOptions, *, keeps_logits: bool = False) -> None:
        """Gather what `options` ask for."""
        self._is_scored = options.return_log_probs and options.return_context_cum_log_probs
        self._top = options.num_prompt_log_probs
        self.keeps_logits = keeps_logits
        self.wants_logits = keeps_logits or self._is_scored or self._top > 0
        self.wants_pooled = options.return_context_embeddings
        self.is_final = False
        self.restart()

    def restart(self) -> None:
        """Drop what was gathered, unless it is final: the row computes its prompt again."""
        if self.is_final:
            return
        self._log_prob = 0.0
        self._scores: list[TokenScore] = []
        self._logits: list[torch.Tensor] = []
        self._pooled: torch.Tensor | None = None

    def add_logits(self, logits: torch.Tensor, next_ids: Sequence[int], *, vocab_size: int) -> None:
        """Take the next chunk's logits (n, V) and the prompt tokens that follow each place."""
        if self.keeps_logits:
            self._logits.append(logits)
        logits = logits[: len(next_ids)]  # no token of the prompt follows its last place
        if not next_ids:
            return
        if self._is_scored:
            self._log_prob += context_log_prob(logits, next_ids, vocab_size=vocab_size)
        if self._top:
            self._scores += token_scores(logits, next_ids, top=self._top, vocab_size=vocab_size)

    def add_pooled(self, pooled: torch.Tensor) -> None:
        """Take the sum (E,) of the next chunk's hidden states."""
        self._pooled = pooled if self._pooled is None else self._pooled + pooled

    def commit(self) -> None:
        """Make the outputs final: the whole prompt has been computed."""
        self.is_final = True
        self.wants_logits = self.wants_pooled = False

    @property
    def scores(self) -> PromptScores:
        """The scores of the prompt's tokens, from the second token on."""
        return PromptScores(self._log_prob, tuple(self._scores))

    @property
    def pooled(self) -> torch.Tensor | None:
        """The sum (E,) fp32 of the prompt's last hidden states; None if it was not asked for."""
        return self._pooled

    @property
    def logits(self) -> torch.Tensor | None:
        """All logits (tokens, V) once they are complete; None if they were not asked for."""
        return torch.cat(self._logits) if self.keeps_logits and self.is_final else None
