"""Models with an engine that is none, for processes that load them by name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from inference.backend.arguments import ModelArguments
from inference.backend.engine_model import EngineModel
from inference.backend.instances import ONLY
from inference.backend.metrics import ModelMetrics
from inference.backend.requests import TOKENS, InferRequest, ModelError, ModelHost, Responses
from inference.engine.load import EngineLoad


class Scripted(EngineModel):
    """Answers as the text `do` of a request says."""

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        if "refuse" in arguments.parameters:
            raise ValueError("its weights are \udcff none")
        self.host, self.parameters = host, arguments.parameters
        self.engine = SimpleNamespace(steps=7)  # type: ignore[assignment]
        self.metrics = ModelMetrics("m", ONLY, EngineLoad, {})
        host.show(self.metrics)

    def close(self) -> None:
        pass

    async def infer(
        self, request: InferRequest, *, queued: Callable[[float], None] = lambda _: None
    ) -> Responses:
        does = bytes(request.tensors["do"].flat[0]).decode()
        if does == "end":
            os._exit(3)
        if does == "leave":
            self.host.leave("a rank is gone")
            await self._never()
        if does == "wait":
            try:
                await self._never()
            finally:
                self.metrics.ended("cancelled")
        if does == "fault":
            raise KeyError("a fault")
        if does == "refuse":
            raise ModelError("too busy", "UNAVAILABLE")
        if does == "tokens":
            for step in ([[1], [2]], [[3], []], [[4], [5, 6]]):
                yield {TOKENS: step}, False
            queued(0.5)
            yield {TOKENS: [[1, 3, 4], [2, 5, 6, 7]]}, True
            return
        if does == "flood":
            for number in range(1000):
                self.engine.steps = number
                yield {"step": np.array([number])}, number == 999
            return
        import torch  # takes time

        yield {"half": torch.ones(2, dtype=torch.bfloat16), "whole": torch.arange(2)}, False
        yield {"text": np.array([b"a"], object), "said": np.array([len(self.parameters)])}, True

    async def _never(self) -> Any:
        await asyncio.Event().wait()
