"""One request of the task `identity`: asked of the server, computed by the source, compared."""

# Shapes: S padded prompt, N tokens of the prompt, R of the answer, E hidden

import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export_scripts.conversion.plan import plan_conversion
from export_scripts.conversion.request import ConversionRequest
from inference.certify.activations import (
    EMBEDDING,
    LOGITS,
    OUTPUT,
    Activations,
    ModelInputs,
    size_of_errors,
)
from inference.certify.layers import load_source
from inference.evaluation.options import IdentityOptions
from inference.evaluation.rows import GREEDY_WITH_LOG_PROBS, answers, generation_request, padded
from inference.evaluation.task import TextGenerator, generates


@dataclass(frozen=True)
class RowDifference:
    """The difference between the server's answer to one row and the source's.

    Attributes:
        relative: the largest error, of the source's largest value or logit.
        same_tokens: whether a generated answer is the source's; None where none is generated.
        answer: what was compared, for the report.
    """

    max_abs: float
    mean_abs: float
    relative: float
    answer: str
    same_tokens: bool | None = None


class IdentitySource:
    """The source checkpoint, one row at a time; safe to use from several threads."""

    def __init__(self, checkpoint: Path, given: Sequence[tuple[str, str]] = ()) -> None:
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
        plan = plan_conversion(request)
        with tempfile.TemporaryDirectory() as scratch:
            self._model = load_source(plan, checkpoint, Path(scratch))
        self._lock = threading.Lock()

    def draw_rows(self, options: IdentityOptions, seed: int) -> list[tuple[int, ...]]:
        """Return rows of random token ids, as long as asked for or as the model takes."""
        generator, longest = random.Random(seed), options.input_len
        if self._model.positions is not None:
            longest = max(1, min(longest, self._model.positions - options.output_len))
        shortest = min(longest, options.min_input_len or (longest + 1) // 2)
        lengths = (generator.randint(shortest, longest) for _ in range(options.samples))
        vocab_size = self._model.vocab_size
        return [tuple(generator.randrange(vocab_size) for _ in range(n)) for n in lengths]

    def compare(
        self, rows: Sequence[tuple[int, ...]], model: TextGenerator, *, output_len: int
    ) -> list[RowDifference]:
        """Send rows in one request and compare the answer to each.

        Raises:
            RequestFailedError: the server refused, failed or did not answer in time.
        """
        if not generates(model):
            return self._compare_states(rows, model)
        has_encoder = "max_output_len" in model.input_names()
        request = generation_request(
            rows, output_len, GREEDY_WITH_LOG_PROBS, has_encoder=has_encoder
        )
        outputs = model.infer(request, ("output_ids", "sequence_length", "output_log_probs"))
        found = answers(rows, outputs, has_encoder=has_encoder)
        return [
            self._compare_answer(ids, answer, log_probs[0, : len(answer)], has_encoder)
            for ids, answer, log_probs in zip(rows, found, outputs["output_log_probs"], strict=True)
        ]

    def _run(self, inputs: ModelInputs) -> Activations:
        with self._lock:
            return self._model.run(inputs)

    def _compare_states(
        self, rows: Sequence[tuple[int, ...]], model: TextGenerator
    ) -> list[RowDifference]:
        """Compare hidden states, each (N, E) with what the server gave, (S, E)."""
        ids, lengths = padded(rows)
        if "input_hidden_state" in model.input_names():
            computed = [self._run(ModelInputs(row)) for row in rows]
            expected = [each[OUTPUT] for each in computed]
            embedded = [each[EMBEDDING] for each in computed]
            states = torch.nn.utils.rnn.pad_sequence(embedded, batch_first=True).numpy()
            request = {"input_hidden_state": states, "sequence_lengths": lengths.astype(np.int32)}
        else:
            expected = [self._run(ModelInputs(row))[OUTPUT] for row in rows]
            request = {"input_ids": ids, "sequence_length": lengths}
        answer = model.infer(request, ("output_hidden_state",))["output_hidden_state"]
        found = []
        for theirs, states in zip(expected, answer, strict=True):
            ours = torch.tensor(np.asarray(states[: len(theirs)], np.float32))
            errors = size_of_errors(theirs, ours, largest=float(theirs.abs().max()))
            found.append(RowDifference(*errors, answer=f"{len(theirs)} hidden states"))
        return found

    def _compare_answer(
        self, ids: tuple[int, ...], answer: tuple[int, ...], log_probs: Any, has_encoder: bool
    ) -> RowDifference:
        if has_encoder:
            start = self._model.default_inputs(ids).decoder_ids[:1]
            logits = self._run(ModelInputs(ids, (*start, *answer[:-1])))[LOGITS]
        else:
            logits = self._run(ModelInputs((*ids, *answer[:-1])))[LOGITS][len(ids) - 1 :]
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)  # (R,)
        largest = float(logits.abs().max())
        return RowDifference(
            *size_of_errors(theirs, torch.tensor(log_probs), largest=largest),
            answer=" ".join(map(str, answer)),
            same_tokens=logits.argmax(-1).tolist() == list(answer),
        )
