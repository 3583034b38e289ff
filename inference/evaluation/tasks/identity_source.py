"""Rows of the task `identity`: asked of the server, computed by the source, compared."""

# Shapes: S padded prompt, N tokens of the prompt, R of the answer, E hidden

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from export_scripts.conversion.plan import plan_conversion
from export_scripts.conversion.request import ConversionRequest
from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    OUTPUT,
    ModelInputs,
    Source,
    size_of_errors,
)
from inference.certify.layers import load_source
from inference.evaluation.rows import GREEDY_WITH_LOG_PROBS, answers, generation_request, padded
from inference.evaluation.task import TextGenerator, generates


class RowDifference(NamedTuple):
    """The difference between the server's answer to one row and the source's.

    `relative` is of the source's largest value or logit; `same_tokens` is None where no tokens are
    generated; `answer` is what was compared, for the report.
    """

    max_abs: float
    mean_abs: float
    relative: float
    answer: str
    same_tokens: bool | None = None


def load_checkpoint(checkpoint: Path, given: Sequence[tuple[str, str]] = ()) -> Source:
    """Load a checkpoint folder with its library, in fp32, as its conversion would read it.

    `given` are config.ini values that it does not record.

    Raises:
        ValueError: the library is missing, or the folder is not one that it can compute.
    """
    request = ConversionRequest(
        checkpoint,
        checkpoint.parent,
        tp_size=1,
        weight_data_type="fp32",
        allow=("*",),
        allow_setting=("*",),
        given=tuple(given),
    )
    with tempfile.TemporaryDirectory() as scratch:
        return load_source(plan_conversion(request), checkpoint, Path(scratch))


def compare_rows(
    source: Source, rows: Sequence[tuple[int, ...]], model: TextGenerator, *, output_len: int
) -> list[RowDifference]:
    """Send rows in one request and compare the answer to each.

    Raises:
        RequestFailedError: the server refused, failed or did not answer in time.
    """
    if not generates(model):
        return _compare_states(source, rows, model)
    has_encoder = "max_output_len" in model.input_names()
    request = generation_request(rows, output_len, GREEDY_WITH_LOG_PROBS, has_encoder=has_encoder)
    outputs = model.infer(request, ("output_ids", "sequence_length", "output_log_probs"))
    found = answers(rows, outputs, has_encoder=has_encoder)
    return [
        _compare_answer(source, ids, answer, log_probs[0, : len(answer)])
        for ids, answer, log_probs in zip(rows, found, outputs["output_log_probs"], strict=True)
    ]


def _compare_states(
    source: Source, rows: Sequence[tuple[int, ...]], model: TextGenerator
) -> list[RowDifference]:
    """Compare hidden states, each (N, E) with what the server gave, (S, E)."""
    ids, lengths = padded(rows)
    computed = [source.run(ModelInputs(row)) for row in rows]
    request = {"input_ids": ids, "sequence_length": lengths}
    if "input_hidden_state" in model.input_names():
        embedded = [each[EMBEDDING] for each in computed]
        states = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True).numpy()
        request = {"input_hidden_state": states, "sequence_lengths": lengths.astype(np.int32)}
    served = model.infer(request, ("output_hidden_state",))["output_hidden_state"]
    found = []
    for expected, states in zip((each[OUTPUT] for each in computed), served, strict=True):
        own = torch.tensor(np.asarray(states[: len(expected)], np.float32))
        errors = size_of_errors(expected, own, largest=float(expected.abs().max()))
        found.append(RowDifference(*errors, answer=f"{len(expected)} hidden states"))
    return found


def _compare_answer(
    source: Source, ids: tuple[int, ...], answer: tuple[int, ...], log_probs: Any
) -> RowDifference:
    inputs = ModelInputs((*ids, *answer[:-1]))
    if source.start is not None:
        inputs = ModelInputs(ids, (source.start, *answer[:-1]))
    logits = source.run(inputs)[LOGITS][-len(answer) :]
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)  # (R,)
    largest = float(logits.abs().max())
    return RowDifference(
        *size_of_errors(wanted, torch.tensor(log_probs), largest=largest),
        answer=" ".join(map(str, answer)),
        same_tokens=logits.argmax(-1).tolist() == list(answer),
    )
