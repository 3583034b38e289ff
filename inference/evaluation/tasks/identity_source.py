"""One request of the task `identity`: asked of the server, computed by the source, compared."""

# Shapes: B rows, S padded prompt, N tokens of the prompt, R of the answer, E hidden, V vocabulary

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export_scripts.conversion.plan import plan_conversion
from export_scripts.conversion.request import OPTION_NAMES, ConversionRequest
from inference.evaluation.options import IdentityOptions
from inference.evaluation.task import TextGenerator, generates
from inference.parity.activations import Activations, ModelInputs, Place, size_of_errors
from inference.parity.huggingface import HuggingFaceSource, load_huggingface
from inference.parity.mesh_transformer import load_mesh_transformer

# The most probable token, by the nucleus path: unlike the top-k path with one candidate, it
# reports log probabilities under the whole vocabulary.
_GREEDY: Mapping[str, Any] = {
    "runtime_top_k": [[0]],
    "runtime_top_p": [[1e-6]],
    "beam_width": [[1]],
    "temperature": [[1.0]],
    "repetition_penalty": [[1.0]],
    "is_return_log_probs": [[True]],
}


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
        """Load a checkpoint folder with its library.

        `given` are config.ini values that it does not record.

        Raises:
            ValueError: the library is missing, or the folder is not one that it can compute.
        """
        self._model = _load(checkpoint, given)
        self._lock = threading.Lock()
        config = self._model.model.config
        self._vocab_size: int = config.vocab_size
        self._positions: int | None = getattr(config, "max_position_embeddings", None)

    def longest_row(self, options: IdentityOptions) -> int:
        """Return the tokens of the longest row: those asked for, or as many as the model takes."""
        if self._positions is None:
            return options.input_len
        return max(1, min(options.input_len, self._positions - options.output_len))

    def draw_row(self, generator: random.Random, length: int) -> tuple[int, ...]:
        """Return random token ids."""
        return tuple(generator.randrange(self._vocab_size) for _ in range(length))

    def compare(
        self, rows: Sequence[tuple[int, ...]], model: TextGenerator, *, output_len: int
    ) -> list[RowDifference]:
        """Send rows in one request and compare the answer to each.

        Raises:
            RequestFailedError: the server refused, failed or did not answer in time.
        """
        inputs = model.input_names()
        if "input_hidden_state" in inputs:
            return self._compare_bert(rows, model)
        if generates(model):
            return self._compare_answers(rows, model, output_len, "max_output_len" in inputs)
        return self._compare_encoder(rows, model)

    def _run(self, inputs: ModelInputs) -> Activations:
        with self._lock:
            return self._model.run(inputs)

    def _compare_bert(
        self, rows: Sequence[tuple[int, ...]], model: TextGenerator
    ) -> list[RowDifference]:
        computed = [self._run(ModelInputs(ids)) for ids in rows]
        states = [each[Place("embedding")] for each in computed]  # each (N, E)
        request = {
            "input_hidden_state": torch.nn.utils.rnn.pad_sequence(states, batch_first=True).numpy(),
            "sequence_lengths": _lengths(rows).astype(np.int32),
        }
        found = model.infer(request, ("output_hidden_state",))["output_hidden_state"]
        # Expected are those of the last layer.
        return [
            _compare_states(list(each.values())[-1], states)
            for each, states in zip(computed, found, strict=True)
        ]

    def _compare_encoder(
        self, rows: Sequence[tuple[int, ...]], model: TextGenerator
    ) -> list[RowDifference]:
        request = {"input_ids": _padded(rows), "sequence_length": _lengths(rows)}
        found = model.infer(request, ("output_hidden_state",))["output_hidden_state"]
        place = Place("encoder final norm")
        return [
            _compare_states(self._run(self._model.default_inputs(ids))[place], states)
            for ids, states in zip(rows, found, strict=True)
        ]

    def _compare_answers(
        self,
        rows: Sequence[tuple[int, ...]],
        model: TextGenerator,
        output_len: int,
        has_encoder: bool,
    ) -> list[RowDifference]:
        names = (
            ("sequence_length", "max_output_len")
            if has_encoder
            else ("input_lengths", "request_output_len")
        )
        request = {
            "input_ids": _padded(rows),
            names[0]: _lengths(rows),
            names[1]: np.full((len(rows), 1), output_len, np.uint32),
            **{name: value * len(rows) for name, value in _GREEDY.items()},
        }
        outputs = model.infer(request, ("output_ids", "sequence_length", "output_log_probs"))
        # sequence_length counts from the padded prompts; an answer follows its own prompt.
        padded = 0 if has_encoder else max(map(len, rows))
        found = []
        for b, ids in enumerate(rows):
            start = 0 if has_encoder else len(ids)
            count = int(outputs["sequence_length"][b].reshape(-1)[0]) - padded
            answer = tuple(int(each) for each in outputs["output_ids"][b, 0, start : start + count])
            log_probs = torch.tensor(outputs["output_log_probs"][b, 0, :count])
            found.append(self._compare_answer(ids, answer, log_probs, has_encoder))
        return found

    def _compare_answer(
        self,
        ids: tuple[int, ...],
        answer: tuple[int, ...],
        log_probs: torch.Tensor,
        has_encoder: bool,
    ) -> RowDifference:
        logits = self._answer_logits(ids, answer, has_encoder)  # (R, V)
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        return RowDifference(
            *size_of_errors(theirs, log_probs, largest=float(logits.abs().max())),
            answer=" ".join(map(str, answer)),
            same_tokens=logits.argmax(-1).tolist() == list(answer),
        )

    def _answer_logits(
        self, ids: tuple[int, ...], answer: tuple[int, ...], has_encoder: bool
    ) -> torch.Tensor:
        """Return the logits that the source gives each token of an answer (R, V)."""
        if has_encoder:
            start = self._model.default_inputs(ids).decoder_ids[:1]
            return self._run(ModelInputs(ids, (*start, *answer[:-1])))[Place("logits")]
        return self._run(ModelInputs((*ids, *answer[:-1])))[Place("logits")][len(ids) - 1 :]


def _load(checkpoint: Path, given: Sequence[tuple[str, str]]) -> HuggingFaceSource:
    """Load a source in fp32, as what its conversion would find it to be."""
    request = ConversionRequest(
        checkpoint,
        checkpoint.parent,
        tp_size=1,
        weight_data_type="fp32",
        allow=("*",),
        given=tuple(given),
    )
    plan = plan_conversion(request, names=OPTION_NAMES)
    if plan.facts.reader.format == "jax":
        return load_mesh_transformer(plan)
    return load_huggingface(plan)


def _padded(rows: Sequence[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    """Return token ids (B, S), each row padded on the right with its last token."""
    width = max(map(len, rows))
    return np.array([[*row, *[row[-1]] * (width - len(row))] for row in rows], np.uint32)


def _lengths(rows: Sequence[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    """Return the tokens of each row (B, 1)."""
    return np.array([[len(row)] for row in rows], np.uint32)


def _compare_states(expected: torch.Tensor, found: Any) -> RowDifference:
    """Compare hidden states (N, E) with those that the server gave, (S, E)."""
    ours = torch.tensor(np.asarray(found[: len(expected)], np.float32))
    errors = size_of_errors(expected, ours, largest=float(expected.abs().max()))
    return RowDifference(*errors, answer=f"{len(expected)} hidden states")
