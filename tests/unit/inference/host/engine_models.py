"""Models with an engine that is none, for processes that load them by name."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from inference.backend.arguments import ModelArguments
from inference.backend.engine_model import EngineModel
from inference.backend.instances import ONLY
from inference.backend.metrics import ModelMetrics
from inference.backend.requests import TOKENS, InferRequest, ModelHost, Outputs, Submitted
from inference.engine.errors import EngineBusyError
from inference.engine.load import EngineLoad


class Scripted(EngineModel):
    """Answers as the text `do` of a request says."""

    def load(self, arguments: ModelArguments, host: ModelHost) -> None:
        if "refuse" in arguments.parameters:
            raise ValueError("its weights are \udcff none")
        self.host, self.parameters, self.running = host, arguments.parameters, set()
        self.engine = SimpleNamespace(steps=0)  # type: ignore[assignment]
        self.metrics = ModelMetrics("m", ONLY, EngineLoad, {})
        host.show(self.metrics)

    def close(self) -> None:
        pass

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        does = bytes(request.tensors["do"].flat[0]).decode()
        future: Future[Any] = Future()
        steps: list[Outputs] = []
        if does == "end":
            os._exit(3)
        if does == "fault":
            raise KeyError("a fault")
        if does == "refuse":
            raise EngineBusyError("too busy")
        if does == "leave":
            self.host.go_out_of_service("a rank is gone")
        if does == "tokens":
            steps = [{TOKENS: each} for each in ([[1], [2]], [[3], []], [[4], [5, 6]])]
            steps.append({TOKENS: [[1, 3, 4], [2, 5, 6, 7]]})
        if does == "flood":
            steps = [{"step": np.array([number])} for number in range(1000)]
        if does == "tensors":
            import torch  # takes time

            self.engine.steps = 7
            steps = [{"half": torch.ones(2, dtype=torch.bfloat16), "whole": torch.arange(2)}]
            steps.append(
                {"text": np.array([b"a"], object), "said": np.array([len(self.parameters)])}
            )
        for each in steps[:-1]:
            on_step(each)
        if steps:
            future.set_result(Result(steps[-1]))
        return future, self._outputs

    def _outputs(self, made: Any) -> Outputs:
        outputs: Outputs = getattr(made, "outputs", made)
        if "step" in outputs:
            self.engine.steps = int(outputs["step"][0])
        return outputs


class Result:
    """The last outputs of a request, and its times."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.times = SimpleNamespace(queued_s=0.5)
