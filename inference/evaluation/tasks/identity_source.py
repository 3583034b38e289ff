"""One row of the task `identity`: asked of the server, computed by the source, compared."""

# Shapes: N tokens of the prompt, R of the answer, E hidden, V vocabulary

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export_scripts.conversion.plan import plan_conversion
from export_scripts.conversion.request import OPTION_NAMES, ConversionRequest
from export_scripts.families.layout.architecture import Architecture
from inference.evaluation.options import IdentityOptions
from inference.evaluation.task import TextGenerator, generates
from inference.parity.activations import Activations, ModelInputs, Place
from inference.parity.huggingface import load_huggingface

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

    def __init__(self, checkpoint: Path) -> None:
        """Load a checkpoint folder with its library.

        Raises:
            ValueError: the library is missing, or the folder is not one that it can compute.
        """
        self._model = load_huggingface(checkpoint, _architecture(checkpoint))
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
        self, ids: tuple[int, ...], model: TextGenerator, *, output_len: int
    ) -> RowDifference:
        """Ask the server about one row and compare.

        Raises:
            RequestFailedError: the server refused, failed or did not answer in time.
        """
        inputs = model.input_names()
        if "input_hidden_state" in inputs:
            return self._compare_bert(ids, model)
        if generates(model):
            return self._compare_answer(ids, model, output_len, "max_output_len" in inputs)
        return self._compare_encoder(ids, model)

    def _run(self, inputs: ModelInputs) -> Activations:
        with self._lock:
            return self._model.run(inputs)

    def _compare_bert(self, ids: tuple[int, ...], model: TextGenerator) -> RowDifference:
        computed = self._run(ModelInputs(ids))
        states = computed[Place("embedding")]  # (N, E)
        request = {
            "input_hidden_state": states.numpy()[None],
            "sequence_lengths": np.array([[len(ids)]], np.int32),
        }
        outputs = model.infer(request, ("output_hidden_state",))
        expected = list(computed.values())[-1]  # of the last layer
        return _compare_states(expected, outputs["output_hidden_state"])

    def _compare_encoder(self, ids: tuple[int, ...], model: TextGenerator) -> RowDifference:
        request = {
            "input_ids": np.array([ids], np.uint32),
            "sequence_length": np.array([[len(ids)]], np.uint32),
        }
        outputs = model.infer(request, ("output_hidden_state",))
        expected = self._run(self._model.default_inputs(ids))[Place("encoder final norm")]
        return _compare_states(expected, outputs["output_hidden_state"])

    def _compare_answer(
        self, ids: tuple[int, ...], model: TextGenerator, output_len: int, has_encoder: bool
    ) -> RowDifference:
        names = (
            ("sequence_length", "max_output_len")
            if has_encoder
            else ("input_lengths", "request_output_len")
        )
        request = {
            "input_ids": np.array([ids], np.uint32),
            names[0]: np.array([[len(ids)]], np.uint32),
            names[1]: np.array([[output_len]], np.uint32),
            **_GREEDY,
        }
        outputs = model.infer(request, ("output_ids", "sequence_length", "output_log_probs"))
        start = 0 if has_encoder else len(ids)
        stop = int(outputs["sequence_length"].reshape(-1)[0])
        answer = tuple(int(each) for each in outputs["output_ids"][0, 0, start:stop])
        log_probs = torch.tensor(outputs["output_log_probs"][0, 0, : len(answer)])
        logits = self._answer_logits(ids, answer, has_encoder)  # (R, V)
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        same = logits.argmax(-1).tolist() == list(answer)
        return _difference(
            theirs,
            log_probs,
            largest=float(logits.abs().max()),
            answer=" ".join(map(str, answer)),
            same_tokens=same,
        )

    def _answer_logits(
        self, ids: tuple[int, ...], answer: tuple[int, ...], has_encoder: bool
    ) -> torch.Tensor:
        """Return the logits that the source gives each token of an answer (R, V)."""
        if has_encoder:
            start = self._model.default_inputs(ids).decoder_ids[:1]
            return self._run(ModelInputs(ids, (*start, *answer[:-1])))[Place("logits")]
        return self._run(ModelInputs((*ids, *answer[:-1])))[Place("logits")][len(ids) - 1 :]


def _architecture(checkpoint: Path) -> Architecture:
    """Return what a checkpoint is, as its conversion would find it."""
    request = ConversionRequest(
        checkpoint, checkpoint.parent, tp_size=1, weight_data_type="fp32", allow=("*",)
    )
    plan = plan_conversion(request, names=OPTION_NAMES)
    return plan.mapping.family.architecture(plan.config)


def _compare_states(expected: torch.Tensor, found: Any) -> RowDifference:
    """Compare hidden states (N, E) with those that the server gave, (1, N, E)."""
    ours = torch.tensor(np.asarray(found[0], np.float32))
    largest = float(expected.abs().max())
    return _difference(expected, ours, largest=largest, answer=f"{len(expected)} hidden states")


def _difference(
    expected: torch.Tensor,
    found: torch.Tensor,
    *,
    largest: float,
    answer: str,
    same_tokens: bool | None = None,
) -> RowDifference:
    error = (found - expected).abs()
    max_abs = float(error.max())
    return RowDifference(
        max_abs=max_abs,
        mean_abs=float(error.mean()),
        relative=max_abs / largest if largest else max_abs,
        answer=answer,
        same_tokens=same_tokens,
    )
