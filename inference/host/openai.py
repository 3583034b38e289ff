"""Models of this process as OpenAI's protocol asks them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np

from inference.backend.exchange import Array
from inference.backend.text_models import pad_rows
from inference.front.openai.answers import Candidate
from inference.front.openai.prepare import ModelFacts
from inference.front.openai.served import HIDDEN, candidates_of, unit_vectors, wanted_outputs
from inference.host.calls import InferRequest
from inference.host.models import HostedModel
from inference.host.tensors import as_array


class HostedGenerator:
    """One model of this process that completes or encodes token ids."""

    def __init__(self, model: HostedModel, facts: ModelFacts) -> None:
        self.facts = facts
        self._model = model

    async def generate(
        self, job: Mapping[str, Array], *, streams: bool
    ) -> AsyncGenerator[Sequence[Candidate], None]:
        """Yield the candidates, whole, and before as they grow. Closing it cancels the job.

        `job` holds the inputs. Without `streams` candidates that still grow need not come. Raises
        RejectedError if the model refuses the request, or cannot answer.
        """
        wanted = wanted_outputs(job)
        came: asyncio.Queue[Any] = asyncio.Queue()
        # Scores come with whole responses alone.
        has_steps = len(wanted) == 2
        steps = (came.put_nowait if streams else _ignore) if has_steps else None
        request = InferRequest(dict(job), wanted, steps=steps)
        answering = asyncio.create_task(self._answer(request, came))
        rows: list[list[int]] = [[] for _ in job["input_ids"]]
        prompt_len = 0 if self.facts.encoder_decoder else job["input_ids"].shape[1]
        try:
            while (each := await came.get()) is not None:
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, Mapping):
                    outputs = {name: as_array(value) for name, value in each.items()}
                    yield candidates_of(outputs, prompt_len)
                    continue
                for row, new in zip(rows, each, strict=True):
                    row += new
                if came.empty():
                    yield [Candidate(row) for row in rows]
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(self, request: InferRequest, came: asyncio.Queue[Any]) -> None:
        try:
            async with contextlib.aclosing(self._model.infer(request)) as responses:
                async for outputs, _ in responses:
                    if outputs:
                        came.put_nowait(outputs)
        except Exception as error:  # whatever it is, the request ends with it
            came.put_nowait(error.with_traceback(None))
        else:
            came.put_nowait(None)

    async def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """Return each row's mean hidden state, scaled to length 1, (B, E). Raises RejectedError."""
        found = []
        for first in range(0, len(rows), self.facts.max_rows):
            ids, lengths = pad_rows(rows[first : first + self.facts.max_rows], pad_id=0)
            tensors = {"input_ids": ids, "sequence_length": lengths}
            request = InferRequest(tensors, [HIDDEN])
            async with contextlib.aclosing(self._model.infer(request)) as responses:
                async for outputs, _ in responses:
                    hidden = as_array(outputs[HIDDEN])  # (B, S, E)
            found.append(hidden.sum(1, dtype=np.float32) / lengths)
        return unit_vectors(np.concatenate(found))


def _ignore(_: object) -> None:
    """Take no news."""
