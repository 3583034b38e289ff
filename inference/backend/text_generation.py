"""Text in, text out in one model, with the tensors that clients of PyTriton know."""

# Shapes: B rows of a request, K beams

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from export_scripts.ft.config_ini import read_config
from inference.backend.engine_model import Exchange
from inference.backend.python_backend import GenerationModel
from inference.backend.text_models import row_texts
from inference.backend.tokenizer import Tokenizer, load_tokenizer
from inference.backend.triton_model import (
    RequestInputs,
    Tensors,
    request_tensors,
    response,
)
from inference.decoding.request import RequestError, parse_request

if TYPE_CHECKING:
    from inference.engine.engine import Engine, GenerationResult

RowRead = tuple[list[int], Tensors]  # tokens of a prompt, and the other tensors of its row


@dataclass(frozen=True)
class QueuedRow:
    """A row that the engine has, or had."""

    prompt_ids: Sequence[int]
    future: Future[GenerationResult]


class TextService:
    """Answers requests with an engine; safe to call from several threads."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, tasks: Sequence[str] = ()) -> None:
        """Take a running engine, its tokenizer, and the names of its prompt tables."""
        self._engine = engine
        self._tasks = list(tasks)
        self._tokenizer = tokenizer
        limits = engine.limits
        self._special = tokenizer.special_ids | {limits.start_id, limits.end_id}
        longest = engine.capacity.max_len
        self.max_seq_len = min(longest, limits.max_pos_seq_len or longest)

    def begin(self, request: Tensors) -> list[QueuedRow]:
        """Queue the rows of a request, each by itself, so that none waits for a longer one.

        Raises RequestError, EngineBusyError or EngineFailedError.
        """
        rows: list[QueuedRow] = []
        try:
            for b, (ids, options) in enumerate(self._read(request)):
                rows.append(self._submit(b, ids, options))
        except BaseException:
            for row in rows:
                row.future.cancel()
            raise
        return rows

    def _read(self, request: Tensors) -> list[RowRead]:
        """Return the tokens and the options of each row. Raises RequestError."""
        texts = row_texts("prompts", request["prompts"], most_bytes=self._tokenizer.most_text_bytes)
        output_lens = column(request, "request_output_len", len(texts))
        beam_widths = column(request, "beam_width", len(texts), default=1)
        problems = self.length_problems("request_output_len", output_lens)
        if len(set(beam_widths)) > 1:
            problems.append("beam_width must be identical for all rows of a request")
        if problems:
            raise RequestError(problems)
        return [
            (
                self.fitting(self._tokenizer.encode(text, special=True), output_len),
                {
                    "request_output_len": np.array([[output_len]], np.uint32),
                    "beam_width": np.array([[beam_width]], np.uint32),
                },
            )
            for text, output_len, beam_width in zip(texts, output_lens, beam_widths, strict=True)
        ]

    def length_problems(self, name: str, output_lens: Sequence[int]) -> list[str]:
        """Return what is wrong with the numbers of new tokens in the input `name`."""
        return [
            f"{name}[{b}]={value} must be in [1, {self.max_seq_len - 1}]"
            for b, value in enumerate(output_lens)
            if not 1 <= value < self.max_seq_len
        ]

    def fitting(self, ids: list[int], output_len: int) -> list[int]:
        """Return the tokens of a prompt, without those at its end for which there is no room."""
        return ids[: self.max_seq_len - output_len]

    def _submit(self, b: int, ids: list[int], options: Tensors) -> QueuedRow:
        tensors = {
            "input_ids": np.array([ids], np.uint32),
            "input_lengths": np.array([[len(ids)]], np.uint32),
            "is_return_log_probs": np.array([[True]]),
            **options,
        }
        try:
            return QueuedRow(ids, self._engine.submit(parse_request(tensors, self._engine.limits)))
        except RequestError as error:
            raise RequestError([f"prompts[{b}]: {each}" for each in error.problems]) from None

    def answer(self, rows: Sequence[QueuedRow]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a request whose rows are done."""
        results = [row.future.result().rows[0] for row in rows]
        sequences = [
            [[*row.prompt_ids, *ids] for ids in result.output_ids]
            for row, result in zip(rows, results, strict=True)
        ]
        texts = [
            [self._tokenizer.decode([i for i in ids if i not in self._special]) for ids in beams]
            for beams in sequences
        ]
        sentences = np.empty((len(texts), len(texts[0]), 1), dtype=object)  # (B, K, 1)
        sentences[:, :, 0] = [[text.encode() for text in beams] for beams in texts]
        return {
            "sentences": sentences,
            "sequence_length": np.array([[len(text) for text in beams] for beams in texts]),
            "cum_log_probs": np.array([result.cum_log_probs for result in results], np.float32),
            "sequence_tokens": np.array([[len(ids) for ids in beams] for beams in sequences]),
        }


def column(request: Tensors, name: str, rows: int, *, default: Any = None) -> list[Any]:
    """Return one value for each row. Raises RequestError for another shape."""
    if name not in request and default is not None:
        return [default] * rows
    value = request[name]
    if value.shape != (rows, 1):
        raise RequestError([f"{name}: expected shape [{rows},1], got {list(value.shape)}"])
    values: list[Any] = value[:, 0].tolist()
    return values


class TextModel(GenerationModel):
    """Serves a converted model and the tokenizer next to its weights."""

    service_class: ClassVar[type[TextService]] = TextService

    @cached_property
    def service(self) -> TextService:
        """The service of the running engine."""
        folder = self.settings.checkpoint_path
        _, config = read_config(folder)
        tasks = [task.task_name for task in config.tasks]
        return self.service_class(self.engine, load_tokenizer(folder), tasks)

    def _check_weights(self) -> None:
        load_tokenizer(self.settings.checkpoint_path)  # without one nothing is loaded
        super()._check_weights()

    def submit(self, exchange: Exchange) -> tuple[Future[Any], Callable[[Any], None]]:
        """Queue the rows of a request, see `EngineModel`."""
        rows = self.service.begin(RequestInputs(request_tensors(exchange.request)))

        def send(_: object) -> None:
            outputs = self.service.answer(rows)
            exchange.send(response(outputs, exchange.wanted), final=True)

        return AllRows([row.future for row in rows]), send


class AllRows(Future[None]):
    """Done when every row is, or as soon as one has failed; cancelling it cancels the rows."""

    def __init__(self, rows: Sequence[Future[Any]]) -> None:
        super().__init__()
        self._rows = rows
        self._left = len(rows)
        self._counting = threading.Lock()
        for row in rows:
            row.add_done_callback(self._count)

    def _count(self, row: Future[Any]) -> None:
        with self._counting:
            self._left -= 1
            if self.done():
                return
            if row.cancelled():
                super().cancel()
            elif (error := row.exception()) is not None:
                self.set_exception(error)
            elif self._left == 0:
                self.set_result(None)
                return
            else:
                return
        self._cancel_rows()

    def cancel(self) -> bool:
        """Cancel the rows that are not done."""
        self._cancel_rows()
        return super().cancel()

    def _cancel_rows(self) -> None:
        for row in self._rows:
            row.cancel()
