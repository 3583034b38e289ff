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
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

from inference.certify.tolerances import tolerance_of
from inference.evaluation.options import Bound
from inference.evaluation.statistics import mean_and_stderr, mean_metric
from inference.evaluation.task import TENSORS, Dataset, Metric, Sample, Score, Task, TextGenerator
from inference.evaluation.tasks.datasets import drawn

if TYPE_CHECKING:
    from inference.evaluation.tasks.identity_source import IdentitySource

RELATIVE = "identity_relative_difference"
LARGEST = "identity_max_difference"
MEAN = "identity_mean_difference"
TOKENS = "identity_same_tokens"
_ROWS = "; "  # between the rows of a sample
_METHODS = {
    RELATIVE: "largest difference from the original library, of its largest value",
    LARGEST: "largest absolute difference from the original library",
    MEAN: "mean absolute difference from the original library",
    TOKENS: "every greedy token is the original library's most probable",
}


class Identity(Task):
    """The task `identity`; its rows are its own."""

    name = "identity"
    only_served = True
    metric_names = tuple(_METHODS)
    needs = dict.fromkeys(_METHODS, TENSORS)

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
    def _source(self) -> IdentitySource:
        from inference.evaluation.tasks.identity_source import IdentitySource

        assert self.options.source_path is not None, "checked before"
        return IdentitySource(self.options.source_path, self.options.given)

    def prepare(self) -> tuple[Dataset, Sequence[Sample]]:
        """Load the source and draw rows of token ids from its vocabulary.

        Raises:
            ValueError: the source's library is not installed or cannot load it.
        """
        own, seed = self.options.identity, self.options.seed
        rows = self._source.draw_rows(own, seed)
        starts = range(0, len(rows), own.batch_size)
        batches = [rows[start : start + own.batch_size] for start in starts]
        texts = [_ROWS.join(" ".join(map(str, row)) for row in batch) for batch in batches]
        dataset, samples = drawn(
            [Sample(index, text, target="") for index, text in enumerate(texts)],
            self.options,
            name="random token ids",
            path=str(self.options.source_path),
            sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        )
        return replace(dataset, seed=seed), samples  # the rows themselves depend on it

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Send one request and compare the answer to each row with the source's."""
        rows = rows_of(sample.text)
        found = self._source.compare(rows, model, output_len=self.options.identity.output_len)
        values = {
            RELATIVE: max(each.relative for each in found),
            LARGEST: max(each.max_abs for each in found),
            MEAN: sum(each.mean_abs for each in found) / len(found),
        }
        if all(each.same_tokens is not None for each in found):
            values[TOKENS] = float(all(each.same_tokens for each in found))
        return Score(values=values, answer=_ROWS.join(each.answer for each in found))

    def metrics(self, samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
        """Return the largest differences, their mean, and for a generator the equal answers."""
        del samples
        values = {name: [score.values[name] for score in scores] for name in (RELATIVE, LARGEST)}
        found = [_difference(name, max(each), 0.0, len(scores)) for name, each in values.items()]
        mean, stderr = mean_and_stderr([score.values[MEAN] for score in scores])
        found.append(_difference(MEAN, mean, stderr, len(scores)))
        if all(TOKENS in score.values for score in scores):
            found.append(mean_metric(TOKENS, scores, key="same_tokens", method=_METHODS[TOKENS]))
        return tuple(found)


def rows_of(text: str) -> list[tuple[int, ...]]:
    """Return the rows of token ids that the text of a sample writes."""
    return [tuple(map(int, row.split())) for row in text.split(_ROWS)]


def _difference(name: str, value: float, stderr: float, count: int) -> Metric:
    return Metric(
        name=name,
        key=name.removeprefix("identity_"),
        value=value,
        stderr=stderr,
        low=value,
        high=value,
        count=count,
        unit="difference",
        higher_is_better=False,
        method=_METHODS[name],
        sample_value=name,
        from_samples=name == MEAN,
    )
