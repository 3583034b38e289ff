"""Text models with the tensors of PyTriton's NeMo example and of NeMo's own query clients."""

# Shapes: B rows of a request, L tokens of the longest sentence, N texts

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from inference.backend.requests import Array, Tensors
from inference.backend.text_generation import RowRead, TextModel, column
from inference.backend.text_models import padded_rows, row_texts, word_list_tensor
from inference.decoding.request import TASK_IDS
from inference.decoding.rows import P_TUNING, RequestError

if TYPE_CHECKING:
    from inference.engine.sequence import GenerationResult

TASK = "text_generation"
# NeMo's defaults (nemo/collections/nlp/modules/common/text_generation_utils.py).
_DEFAULTS: dict[str, Any] = {
    "tasks": TASK,
    "max_length": 30,
    "min_length": 0,
    "use_greedy": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "add_BOS": True,
    "all_probs": False,
    "compute_logprob": False,
}
_UNSUPPORTED = {"all_probs": "send false", "no_repeat_ngram_size": "send 0"}
# The engine's inputs, with NeMo's names and the engine's types.
_ENGINE_INPUTS: dict[str, tuple[str, Any]] = {
    "request_output_len": ("max_length", np.uint32),
    "min_length": ("min_length", np.int32),
    "temperature": ("temperature", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "runtime_top_k": ("top_k", np.uint32),
    "runtime_top_p": ("top_p", np.float32),
}
_LIMITS: dict[str, Any] = {"min_length": np.iinfo(np.int32), "top_k": np.iinfo(np.uint32)}
_WORD_LISTS = {"end_strings": "stop_words_list", "bad_words_list": "bad_words_list"}


class NemoModel(TextModel):
    """A text model with the tensors of PyTriton's NeMo example.

    Without a seed, samples differ between requests.
    """

    def _read(self, request: Tensors) -> list[RowRead]:
        """Return the tokens and the options of each row. Raises RequestError."""
        texts = row_texts("prompts", request["prompts"], max_bytes=self.tokenizer.max_text_bytes)
        rows = len(texts)
        columns = {
            name: column(request, name, rows, default=default)
            for name, default in _DEFAULTS.items()
        }
        columns["tasks"] = [
            task.decode(errors="replace") if isinstance(task, bytes) else task
            for task in columns["tasks"]
        ]
        columns["seed"] = [secrets.randbits(63) for _ in texts]
        if "random_seed" in request:
            columns["seed"] = column(request, "random_seed", rows)
        problems = self.length_problems("max_length", columns["max_length"])
        problems += self._task_problems(columns["tasks"], columns["compute_logprob"])
        problems += [  # NeMo's types are wider than the engine's
            f"{name}[{b}]={value} must be {limits.min} to {limits.max}"
            for name, limits in _LIMITS.items()
            for b, value in enumerate(columns[name])
            if not limits.min <= value <= limits.max
        ]
        problems += [
            f"{name} is not supported; {instead}"
            for name, instead in _UNSUPPORTED.items()
            if any(column(request, name, rows, default=False))
        ]
        if problems:
            raise RequestError(problems)
        columns |= {name: _words(request, name, rows) for name in _WORD_LISTS}
        return [
            self._row(text, {name: values[b] for name, values in columns.items()})
            for b, text in enumerate(texts)
        ]

    def _task_problems(self, tasks: Sequence[str], scored: Sequence[bool]) -> list[str]:
        known = [TASK, *self.tasks]
        return [
            f"tasks[{b}]={task!r}: the model has no such task; use {' or '.join(known)}"
            for b, task in enumerate(tasks)
            if task not in known
        ] + [
            f"compute_logprob[{b}]: virtual tokens have no scores; send false, or the task {TASK}"
            for b, (task, is_scored) in enumerate(zip(tasks, scored, strict=True))
            if task in self.tasks and is_scored
        ]

    def _row(self, text: str, row: dict[str, Any]) -> RowRead:
        tokenizer, limits = self.tokenizer, self.engine.limits
        ids = [limits.start_id] * row["add_BOS"]
        if row["use_greedy"]:
            row |= {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
        options = {
            name: np.array([[row[source]]], dtype)
            for name, (source, dtype) in _ENGINE_INPUTS.items()
        }
        options["random_seed"] = np.array([[row["seed"]]], np.int64).view(np.uint64)
        if row["tasks"] != TASK:
            task_id = self.tasks.index(row["tasks"])
            options[TASK_IDS] = np.array([[task_id]], np.uint32)
            if limits.prompt_learning_type == P_TUNING:
                first = limits.virtual_start_id
                ids += range(first, first + limits.prompt_lengths[task_id])
        if row["compute_logprob"]:
            one = np.array([[1]], np.uint32)
            options |= {"num_log_probs": one, "num_prompt_log_probs": one}
        for name, target in _WORD_LISTS.items():
            if row[name]:
                record = io.StringIO()
                csv.writer(record, lineterminator="").writerow(row[name])
                options[target] = word_list_tensor([record.getvalue()], tokenizer, name=name)
        return self.fitting([*ids, *tokenizer.encode(text)], row["max_length"]), options

    def answer(self, result: GenerationResult) -> dict[str, Array]:
        """Return the outputs of a request."""
        sequences = [ids for (ids,) in self.sequences(result)]
        width = max(map(len, sequences))
        pieces = [[self.tokenizer.decode([token]) for token in ids] for ids in sequences]
        lengths = padded_rows([[*map(len, row)] for row in pieces], width, 0, np.int32)
        answer = {
            "tokens": padded_rows([[*map(str.encode, row)] for row in pieces], width, b"", object),
            "token_ids": padded_rows(sequences, width, self.engine.limits.end_id, np.int32),
            "logprob": padded_rows(
                [[score.log_prob for score in (*row.prompt.scores, *row.scores)]
                 for row in result.rows],
                max(width - 1, 1), np.nan, np.float32,
            ),
            "offsets": lengths.cumsum(1, np.int32) - lengths,
        }  # fmt: skip
        sentences = padded_rows([[self.text(ids).encode()] for ids in sequences], 1, b"", object)
        return {"sentences": sentences, **{name: rows[:, None] for name, rows in answer.items()}}


class NemoDeployModel(NemoModel):
    """A text model with the tensors of NeMo's own clients, NemoQueryLLMPyTorch and NemoQueryLLM.

    NemoQueryLLM sends no use_greedy; as in NeMo, its requests with top_k, top_p or temperature are
    sampled.
    """

    _RENAMED: ClassVar = {
        "max_output_len": "max_length",
        "min_output_len": "min_length",
        "stop_words_list": "end_strings",
        "task_id": "tasks",
    }

    def _read(self, request: Tensors) -> list[RowRead]:
        renamed = {self._RENAMED.get(name, name): value for name, value in request.items()}
        samples = not {"top_k", "top_p", "temperature"}.isdisjoint(renamed)
        if samples and "use_greedy" not in renamed:
            renamed["use_greedy"] = np.zeros((len(renamed["prompts"]), 1), np.bool_)
        return super()._read(renamed)


def _words(request: Tensors, name: str, rows: int) -> list[list[str]]:
    """Return the non-empty texts of each row of a (B, 1, N) or (B, N) input."""
    if name not in request:
        return [[]] * rows
    value = request[name]
    if value.ndim not in (2, 3) or value.shape[0] != rows:
        raise RequestError([f"{name}: expected shape [{rows},1,N], got {list(value.shape)}"])
    return [list(filter(None, row_texts(name, row[:, None]))) for row in value.reshape(rows, -1)]
