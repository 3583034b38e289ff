"""All logits of a prompt by an engine, to compare them with those of other programs."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampling_params import SamplingParams
from inference.engine.engine import Engine
from inference.engine.sequence import PromptOutputs, RunningRequest


class KeptLogits(PromptOutputs):
    """The logits themselves, chunk by chunk."""

    def __init__(self, options: SamplingParams) -> None:
        super().__init__(options)
        self.wants_logits = True
        self.kept: list[torch.Tensor] = []

    def restart(self) -> None:
        super().restart()
        if self.wants_logits:
            self.kept.clear()

    def add_logits(self, logits: torch.Tensor, next_ids: Sequence[int], *, vocab_size: int) -> None:
        del next_ids
        self.kept.append(logits[:, :vocab_size])


def prompt_logits(engine: Engine, input_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits after every token of a prompt, (tokens, vocabulary) fp32."""
    ids = tuple(input_ids)
    row = SequenceRequest(ids, 1, SamplingParams(end_id=engine.limits.end_id), context_ids=ids)
    future: Future[Any] = Future()
    running = RunningRequest(GenerationRequest((row,), padded_len=len(ids)), future)
    running.waiting = [engine._make_sequence(running, 0, row)]
    outputs = running.waiting[0].prompt_outputs = KeptLogits(row.options)
    engine._queue(running)
    future.result()
    return torch.cat(outputs.kept)
