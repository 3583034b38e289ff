"""A single model from text to text, with the tensors of PyTriton's FasterTransformer example."""

# Shapes: B rows of a request, K beams

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from export_scripts.ft.config_ini import read_config
from inference.backend.arguments import RequestInputs
from inference.backend.python_backend import GenerationModel
from inference.backend.requests import Array, InferRequest, Submitted, Tensors
from inference.backend.text_models import row_texts
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.decoding.request import parse_request
from inference.decoding.rows import RequestError, SequenceRequest

if TYPE_CHECKING:
    from inference.engine.sequence import GenerationResult

RowRead = tuple[list[int], Tensors]  # a prompt's tokens, and the option tensors of its row


class TextModel(GenerationModel):
    """A converted model with the tokenizer next to its weights and its prompt tables.

    `tasks` are the names of the prompt tables.
    """

    tokenizer: Tokenizer
    tasks: Sequence[str]

    def _check_weights(self) -> None:
        folder = self.settings.checkpoint_path
        self.tokenizer = load_tokenizer(folder)  # fail before loading weights
        super()._check_weights()
        _, config = read_config(folder)
        self.tasks = [task.task_name for task in config.tasks]

    def submit(self, request: InferRequest, on_step: Callable[[Any], bool]) -> Submitted:
        """Queue a request, see `EngineModel`; it gets a single response."""
        del on_step
        return self.begin(RequestInputs(request.tensors)), self.answer

    def begin(self, request: Tensors) -> Future[GenerationResult]:
        """Queue the rows of a request. Raises RequestError, EngineBusyError or EngineFailedError.

        Rows are parsed one by one, so that none is padded to the longest.
        """
        rows: list[SequenceRequest] = []
        for b, (ids, options) in enumerate(self._read(request)):
            tensors = {
                "input_ids": np.array([ids], np.uint32),
                "input_lengths": np.array([[len(ids)]], np.uint32),
                "is_return_log_probs": np.array([[True]]),
                **options,
            }
            try:
                parsed = parse_request(tensors, self.engine.limits)
            except RequestError as error:
                raise RequestError([f"prompts[{b}]: {text}" for text in error.problems]) from None
            rows += parsed.rows
        return self.engine.submit(replace(parsed, rows=tuple(rows)))

    def _read(self, request: Tensors) -> list[RowRead]:
        """Return the tokens and the options of each row. Raises RequestError."""
        texts = row_texts("prompts", request["prompts"], max_bytes=self.tokenizer.max_text_bytes)
        output_lens = column(request, "request_output_len", len(texts))
        beam_widths = column(request, "beam_width", len(texts), default=1)
        problems = self.length_problems("request_output_len", output_lens)
        if len(set(beam_widths)) > 1:
            problems.append("beam_width must be identical for all rows of a request")
        if problems:
            raise RequestError(problems)
        return [
            (
                self.fitting(self.tokenizer.encode(text, special=True), output_len),
                {
                    "request_output_len": np.array([[output_len]], np.uint32),
                    "beam_width": np.array([[beam_width]], np.uint32),
                },
            )
            for text, output_len, beam_width in zip(texts, output_lens, beam_widths, strict=True)
        ]

    @cached_property
    def _max_seq_len(self) -> int:
        longest = self.engine.capacity.max_len
        return min(longest, self.engine.limits.max_pos_seq_len or longest)

    def length_problems(self, name: str, output_lens: Sequence[int]) -> list[str]:
        """Return a problem for each output length out of range in the input `name`."""
        return [
            f"{name}[{b}]={value} must be in [1, {self._max_seq_len - 1}]"
            for b, value in enumerate(output_lens)
            if not 1 <= value < self._max_seq_len
        ]

    def fitting(self, ids: list[int], output_len: int) -> list[int]:
        """Truncate a prompt's tokens at the end so that the answer fits."""
        return ids[: self._max_seq_len - output_len]

    def answer(self, result: GenerationResult) -> dict[str, Array]:
        """Return the outputs of a request."""
        sequences = self.sequences(result)
        texts = [list(map(self.text, beams)) for beams in sequences]
        sentences = np.empty((len(texts), len(texts[0]), 1), dtype=object)  # (B, K, 1)
        sentences[:, :, 0] = [[text.encode() for text in beams] for beams in texts]
        return {
            "sentences": sentences,
            "sequence_length": np.array([[len(text) for text in beams] for beams in texts]),
            "cum_log_probs": np.array([row.cum_log_probs for row in result.rows], np.float32),
            "sequence_tokens": np.array([[len(ids) for ids in beams] for beams in sequences]),
        }

    def sequences(self, result: GenerationResult) -> list[list[list[int]]]:
        """Return the tokens of prompt and answer by row and beam, without virtual tokens."""
        pairs = zip(result.request.rows, result.rows, strict=True)
        return [
            [[*asked.returned_ids, *ids] for ids in answered.output_ids]
            for asked, answered in pairs
        ]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        limits = self.engine.limits
        hidden = self.tokenizer.special_ids | {limits.start_id, *limits.end_ids}
        return self.tokenizer.decode([index for index in ids if index not in hidden])


def column(request: Tensors, name: str, rows: int, *, default: Any = None) -> list[Any]:
    """Return the values of a (B, 1) input. Raises RequestError for another shape."""
    if name not in request and default is not None:
        return [default] * rows
    value = request[name]
    if value.shape != (rows, 1):
        raise RequestError([f"{name}: expected shape [{rows},1], got {list(value.shape)}"])
    values: list[Any] = value[:, 0].tolist()
    return values
