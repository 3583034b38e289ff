"""The sampler of all running sequences: one step turns a batch of logits into the next tokens.

Sequences join and leave between steps; the result of one never depends on the others.
"""

# Shapes: N slots of all answers of a step, V vocabulary

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from inference.decoding.beam_search import BeamSearch, PooledBeamSearch
from inference.decoding.candidates import Candidates, select
from inference.decoding.processors import pick_slots, process_logits, token_scores
from inference.decoding.rows import SequenceRequest
from inference.decoding.sampling import SampledAnswer, sample

# The answer of a sequence: a single hypothesis, or the beams of a search.
Answer = SampledAnswer | BeamSearch


class Sampler:
    """Begins answers and chooses their tokens; each answer occupies `beam_width` slots."""

    def __init__(
        self,
        vocab_size: int,
        *,
        hypothesis_pool: bool = False,
        output_log_probs_mode: Literal["renormalized", "full"] = "renormalized",
        nucleus_include_boundary: bool = False,
    ) -> None:
        """Set the options that hold for every sequence of a model.

        `hypothesis_pool` selects the beam search of encoder-decoder models. With
        `nucleus_include_boundary` the token at the nucleus boundary keeps its whole mass.
        """
        self.vocab_size = vocab_size
        self._beam_search = PooledBeamSearch if hypothesis_pool else BeamSearch
        self._full_log_probs = output_log_probs_mode == "full"
        self._include_boundary = nucleus_include_boundary

    def begin(self, request: SequenceRequest) -> Answer:
        """Return an answer without tokens."""
        if request.options.beam_width > 1:
            return self._beam_search(request, vocab_size=self.vocab_size)
        return SampledAnswer(
            request,
            vocab_size=self.vocab_size,
            full_log_probs=self._full_log_probs,
            include_boundary=self._include_boundary,
        )

    @torch.inference_mode()
    def step(self, answers: Sequence[Answer], logits: Tensor) -> None:
        """Choose the next token of every slot of unfinished answers.

        `logits`, (N, V) fp32 or wider, has the slots of the answers in their order; it stays
        unchanged.
        """
        # Answers whose candidates are selected together, and their slots that still run.
        groups: dict[tuple[bool, int], tuple[list[Answer], list[int]]] = {}
        first = 0
        for answer in answers:
            assert not answer.is_finished, "a finished answer takes no steps"
            members, slots = groups.setdefault((answer.is_plain, answer.slots), ([], []))
            members.append(answer)
            slots.extend(first + k for k in answer.running)
            first += answer.slots
        shape = list(logits.shape)
        assert shape[0] == first, f"logits {shape} for {first} slots"
        assert shape[1] >= self.vocab_size, f"logits {shape} miss some of the vocabulary"
        for (is_plain, beams), (members, slots) in groups.items():
            if is_plain:
                x = pick_slots(logits[:, : self.vocab_size], slots)
            else:
                rules = [rule for answer in members for rule in answer.rules()]
                x = process_logits(logits, slots=slots, rules=rules, vocab_size=self.vocab_size)
            width = max(answer.width(logits.device.type) for answer in members)
            with_norm = not is_plain and any(answer.needs_norm for answer in members)
            candidates = select(x, width=min(width, self.vocab_size), with_norm=with_norm)
            if beams > 1:
                _search(members, candidates)
                continue
            sampled = [answer for answer in members if isinstance(answer, SampledAnswer)]
            sample(sampled, candidates)
            self._score(sampled, slots, logits)

    def _score(
        self, answers: Sequence[SampledAnswer], slots: Sequence[int], logits: Tensor
    ) -> None:
        """Score the newest tokens of the answers that ask for scores."""
        wanted = [
            (answer, slot)
            for answer, slot in zip(answers, slots, strict=True)
            if answer.options.num_log_probs and answer.error is None
        ]
        if not wanted:
            return
        scored, slots = zip(*wanted, strict=True)
        found = token_scores(
            pick_slots(logits, slots),
            [answer.tokens[0] for answer in scored],
            top=max(answer.options.num_log_probs for answer in scored),
            vocab_size=self.vocab_size,
        )
        for answer, score in zip(scored, found, strict=True):
            answer.scores.append(score)


def _search(members: Sequence[Answer], candidates: Candidates) -> None:
    start = 0
    for answer in members:
        own = candidates.rows(start, len(answer.running))
        start += len(answer.running)
        assert isinstance(answer, BeamSearch)
        if np.isfinite(own.values[:, 0]).all():
            answer.advance(own)
        else:
            answer.fail()
