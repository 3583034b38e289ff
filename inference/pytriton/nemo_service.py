"""Text in, text out, with the inputs and outputs of PyTriton's NeMo example."""

# Shapes: B rows of a request, L tokens of the longest sentence, N texts

from __future__ import annotations

import csv
import io
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.backend.text_models import row_texts
from inference.backend.text_tensors import word_list_tensor
from inference.decoding.request import RequestError
from inference.pytriton.signature import NEMO_INPUTS, NEMO_OUTPUTS
from inference.pytriton.text_service import QueuedRow, RowRead, Tensors, TextService, column

TASK = "text_generation"
# NeMo's (nemo/collections/nlp/modules/common/text_generation_utils.py).
_DEFAULTS: dict[str, Any] = {
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
_NOT_HERE = ("all_probs", "compute_logprob")
# Inputs of the engine that NeMo has under the same name or a similar one, and their types.
_PASSED: dict[str, tuple[str, Any]] = {
    "request_output_len": ("max_length", np.uint32),
    "min_length": ("min_length", np.int32),
    "temperature": ("temperature", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "runtime_top_k": ("top_k", np.uint32),
    "runtime_top_p": ("top_p", np.float32),
}


class NemoService(TextService):
    """Answers requests of NeMo's clients. Sampled answers differ from request to request."""

    inputs = NEMO_INPUTS
    outputs = NEMO_OUTPUTS

    def _read(self, request: Tensors) -> list[RowRead]:
        """Return the tokens and the options of each row. Raises RequestError."""
        texts = row_texts("prompts", request["prompts"])
        rows = len(texts)
        tasks = row_texts("tasks", request["tasks"])
        given = {
            name: column(request, name, rows, default=default)
            for name, default in _DEFAULTS.items()
        }
        problems = [
            f"tasks[{b}]={task!r}: the model has no such task; use {TASK}"
            for b, task in enumerate(tasks)
            if task != TASK
        ]
        problems += self.length_problems("max_length", given["max_length"])
        problems += [
            f"top_k[{b}]={k} must not be negative" for b, k in enumerate(given["top_k"]) if k < 0
        ]
        problems += [
            f"{name} is not computed here; send false" for name in _NOT_HERE if any(given[name])
        ]
        if problems:
            raise RequestError(problems)
        endings = _end_strings(request, rows)
        return [
            self._row(texts[b], {name: values[b] for name, values in given.items()}, endings[b])
            for b in range(rows)
        ]

    def _row(self, text: str, given: dict[str, Any], endings: Sequence[str]) -> RowRead:
        tokenizer, start_id = self._tokenizer, self._engine.limits.start_id
        ids = [start_id] * given["add_BOS"] + tokenizer.encode(text)
        if given["use_greedy"]:
            given |= {"top_k": 1, "top_p": 1.0, "temperature": 1.0}
        options = {
            name: np.array([[given[source]]], dtype) for name, (source, dtype) in _PASSED.items()
        }
        options["random_seed"] = np.array([[secrets.randbits(63)]], np.uint64)
        if endings:
            record = io.StringIO()
            csv.writer(record, lineterminator="").writerow(endings)
            words = word_list_tensor([record.getvalue()], tokenizer, name="end_strings")
            options["stop_words_list"] = words
        return self.fitting(ids, given["max_length"]), options

    def _outputs(self, rows: Sequence[QueuedRow]) -> dict[str, np.ndarray[Any, Any]]:
        end_id = self._engine.limits.end_id
        sequences = [[*row.prompt_ids, *row.future.result().rows[0].output_ids[0]] for row in rows]
        width = max(map(len, sequences))
        token_ids = np.full((len(rows), 1, width), end_id, np.int32)
        tokens = np.full((len(rows), 1, width), b"", object)
        sentences = np.empty((len(rows), 1), object)
        for b, ids in enumerate(sequences):
            token_ids[b, 0, : len(ids)] = ids
            tokens[b, 0, : len(ids)] = [self._tokenizer.decode([each]).encode() for each in ids]
            text = self._tokenizer.decode([each for each in ids if each not in self._special])
            sentences[b, 0] = text.encode()
        return {"sentences": sentences, "tokens": tokens, "token_ids": token_ids}


def _end_strings(request: Tensors, rows: int) -> list[list[str]]:
    """Return the texts that end each row, (B, 1, N) as sent, without the empty ones."""
    if "end_strings" not in request:
        return [[]] * rows
    value = request["end_strings"]
    if value.ndim != 3 or value.shape[:2] != (rows, 1):
        raise RequestError([f"end_strings: expected shape [{rows},1,N], got {list(value.shape)}"])
    return [list(filter(None, row_texts("end_strings", row.T))) for row in value]
