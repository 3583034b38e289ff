"""Identity: the server's outputs against those of the source checkpoint in its own library.

Each sample is one request, a row of token ids or a batch of several; what is compared depends on
the model that is served:

* BERT: the hidden states it makes of the source's own embeddings of the row.
* T5 encoder: its hidden states.
* GPT and T5: a greedy answer. The source then reads prompt and answer in one pass, so that a token
  for which two logits nearly tie does not lead the two apart: compared are the log probabilities of
  the answer's tokens, and whether each token is the source's most probable.

Errors are relative to the source's largest value (its largest logit for log probabilities). How
large rounding makes them depends on the types of weights and computation.
"""

from __future__ import annotations

import hashlib
import random
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING

from inference.certify.tolerances import tolerance_of
from inference.evaluation.options import Bound
from inference.evaluation.statistics import mean_and_stderr, mean_metric
from inference.evaluation.task import (
    TENSORS,
    Drawn,
    Metric,
    Metrics,
    Prediction,
    Sample,
    Score,
    Task,
    TextGenerator,
)
from inference.evaluation.tasks.datasets import drawn

if TYPE_CHECKING:
    from inference.certify.activations import Source

RELATIVE = "identity_relative_difference"
TOKENS = "identity_same_tokens"
_ROWS = "; "  # between the rows of a sample
# Metrics of errors: the field of a row's difference, what joins rows and samples, and its words.
_ERRORS: Mapping[str, tuple[str, Callable[[Iterable[float]], float], str]] = {
    RELATIVE: (
        "relative", max, "largest difference from the original library, of its largest value"
    ),
    "identity_max_difference": (
        "max_abs", max, "largest absolute difference from the original library"
    ),
    "identity_mean_difference": (
        "mean_abs", fmean, "mean absolute difference from the original library"
    ),
}  # fmt: skip


class Identity(Task):
    """The task `identity`; its rows are its own."""

    name = "identity"
    only_served = True
    metric_names = (*_ERRORS, TOKENS)
    needs = dict.fromkeys(metric_names, TENSORS)

    def problems(self) -> list[str]:
        """Return why the source cannot be computed, and lengths that contradict each other."""
        source = self.options.source_path
        identity, problems = self.options.identity, []
        if source is None or not source.exists():
            problems.append(
                "evaluate.tasks has identity, which computes the source checkpoint: "
                f"export.model.checkpoint_path={source} is not there."
            )
        elif find_spec("transformers") is None:
            problems.append("the task identity needs the package transformers; install it.")
        if identity.min_input_len is not None and identity.min_input_len > identity.input_len:
            problems.append(
                f"evaluate.identity.min_input_len={identity.min_input_len} exceeds "
                f"evaluate.identity.input_len={identity.input_len}; lower the one or raise the "
                "other."
            )
        return problems

    def bounds(self) -> dict[str, Bound]:
        """Return the bound on what rounding explains."""
        tolerance = self.options.identity.tolerance
        return {RELATIVE: Bound(max=tolerance or tolerance_of(self.options.types))}

    def remedy(self) -> str:
        """Return the command that names the layer and the tensor behind a deviation."""
        words = ["python", "-m", "inference.certify", str(self.options.source_path)]
        words.append(str(self.options.weights_dir or "FOLDER_OF_SHARDS"))
        return f"to find the layer and the tensor: {shlex.join(words)}"

    @cached_property
    def _source(self) -> Source:
        from inference.evaluation.tasks.identity_source import load_checkpoint

        assert self.options.source_path is not None, "checked before"
        return load_checkpoint(self.options.source_path, self.options.given)

    def prepare(self) -> Drawn:
        """Load the source and draw rows of token ids from its vocabulary.

        Raises:
            ValueError: the source's library is not installed or cannot load it.
        """
        own, source = self.options.identity, self._source
        longest = own.input_len
        if source.positions is not None:
            longest = max(1, min(longest, source.positions - own.output_len))
        shortest = min(longest, own.min_input_len or (longest + 1) // 2)
        draw = random.Random(self.options.seed)
        rows = [
            " ".join(str(draw.randrange(source.vocab_size)) for _ in range(length))
            for length in (draw.randint(shortest, longest) for _ in range(own.samples))
        ]
        starts = range(0, len(rows), own.batch_size)
        texts = [_ROWS.join(rows[start : start + own.batch_size]) for start in starts]
        dataset, samples = drawn(
            [Sample(index, text, target="") for index, text in enumerate(texts)],
            self.options,
            name="random token ids",
            path=str(self.options.source_path),
            sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        )
        return replace(dataset, seed=self.options.seed), samples  # the rows depend on it

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Send one request and compare the answer to each row with the source's."""
        from inference.evaluation.tasks.identity_source import compare_rows

        output_len = self.options.identity.output_len
        found = compare_rows(self._source, rows_of(sample.text), model, output_len=output_len)
        values = {
            name: joined(getattr(each, error) for each in found)
            for name, (error, joined, _) in _ERRORS.items()
        }
        if all(each.same_tokens is not None for each in found):
            values[TOKENS] = float(all(each.same_tokens for each in found))
        return Score(values=values, answer=_ROWS.join(each.answer for each in found))

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the largest differences, their mean, and for a generator the equal answers."""
        figures = []
        for name, (_, joined, method) in _ERRORS.items():
            values = [each.values[name] for each in found]
            is_mean = joined is fmean
            value = joined(values)
            figures.append(
                Metric(
                    name=name,
                    key=name.removeprefix("identity_"),
                    value=value,
                    stderr=mean_and_stderr(values)[1] if is_mean else 0.0,
                    low=value,
                    high=value,
                    count=len(found),
                    unit="difference",
                    higher_is_better=False,
                    method=method,
                    sample_value=name,
                )
            )
        if all(TOKENS in each.values for each in found):
            method = "every greedy token is the original library's most probable"
            figures.append(mean_metric(TOKENS, found, key="same_tokens", method=method))
        return tuple(figures)


def rows_of(text: str) -> list[tuple[int, ...]]:
    """Return the rows of token ids that the text of a sample writes."""
    return [tuple(map(int, row.split())) for row in text.split(_ROWS)]
