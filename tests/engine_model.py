"""The engine in this process, asked by an evaluation's tasks in place of a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inference.backend.tokenizer import load_tokenizer
from inference.decoding.request import parse_request
from inference.engine.engine import Engine
from inference.evaluation.task import TextGenerator

_GREEDY = {"runtime_top_k": np.array([[1]], np.uint32)}
_WAIT_S = 120.0


class EngineModel(TextGenerator):
    """The part of TextGenerator that LAMBADA asks, by an engine and a tokenizer's folder."""

    def __init__(self, engine: Engine, tokenizer_dir: Path) -> None:
        self._engine = engine
        self._tokenizer = load_tokenizer(tokenizer_dir)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def complete_ids(
        self, input_ids: Sequence[int], *, output_len: int, tensors: Any = None
    ) -> tuple[int, ...]:
        assert tensors is None
        row = self._ask(input_ids, output_len, _GREEDY)
        return tuple(row.output_ids[0])

    def context_log_prob(self, input_ids: Sequence[int]) -> float:
        scored = {  # a nucleus of one token, whose log probability is of all tokens
            "runtime_top_k": np.array([[0]], np.uint32),
            "runtime_top_p": np.array([[1e-6]], np.float32),
            "is_return_log_probs": np.array([[True]]),
            "is_return_context_cum_log_probs": np.array([[True]]),
        }
        row = self._ask(input_ids, 1, scored)
        return float(row.cum_log_probs[0]) - float(np.sum(row.output_log_probs[0]))

    def _ask(self, input_ids: Sequence[int], output_len: int, options: dict[str, Any]) -> Any:
        tensors = {
            "input_ids": np.array([input_ids], np.uint32),
            "input_lengths": np.array([[len(input_ids)]], np.uint32),
            "request_output_len": np.array([[output_len]], np.uint32),
            **options,
        }
        request = parse_request(tensors, limits=self._engine.limits)
        (row,) = self._engine.submit(request).result(_WAIT_S).rows
        return row
