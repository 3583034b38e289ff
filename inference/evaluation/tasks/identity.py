"""Identity: the server's outputs against those of the source checkpoint in its own library.

Each sample is a row of token ids; what is compared depends on the model that is served:

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from inference.evaluation.options import Bound, EvaluationOptions, IdentityOptions
from inference.evaluation.statistics import mean_and_stderr
from inference.evaluation.task import Dataset, Metric, Sample, Score, TaskEntry, TextGenerator
from inference.evaluation.tasks.datasets import drawn
from inference.evaluation.tasks.metrics import accuracy_metric
from inference.parity.tolerances import tolerance_of

if TYPE_CHECKING:
    from inference.evaluation.tasks.identity_source import IdentitySource

RELATIVE, LARGEST, MEAN, TOKENS = _METRICS = (
    "identity_relative_difference",
    "identity_max_difference",
    "identity_mean_difference",
    "identity_same_tokens",
)
_METHODS = {
    RELATIVE: "largest difference from the original library, of its largest value",
    LARGEST: "largest absolute difference from the original library",
    MEAN: "mean absolute difference from the original library",
    TOKENS: "every greedy token is the original library's most probable",
}


@dataclass(frozen=True)
class Identity:
    """The task `identity`; its rows are its own."""

    options: IdentityOptions
    source_path: Path
    limit: int | None = None
    seed: int = 1234
    name: str = "identity"
    version: int = 1

    @cached_property
    def _source(self) -> IdentitySource:
        from inference.evaluation.tasks.identity_source import IdentitySource

        return IdentitySource(self.source_path)

    def prepare(self) -> tuple[Dataset, Sequence[Sample]]:
        """Load the source and draw rows of token ids from its vocabulary.

        Raises:
            ValueError: the source's library is not installed or cannot load it.
        """
        generator = random.Random(self.seed)
        longest = self._source.longest_row(self.options)
        rows = [
            self._source.draw_row(generator, generator.randint((longest + 1) // 2, longest))
            for _ in range(self.options.samples)
        ]
        texts = [" ".join(map(str, row)) for row in rows]
        dataset, samples = drawn(
            [Sample(index, text, target="") for index, text in enumerate(texts)],
            name="random token ids",
            path=str(self.source_path),
            sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
            limit=self.limit,
            seed=self.seed,
        )
        return replace(dataset, seed=self.seed), samples  # the rows themselves depend on it

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Ask the server for one row and compare its answer with the source's."""
        ids = tuple(map(int, sample.text.split()))
        found = self._source.compare(ids, model, output_len=self.options.output_len)
        values = {RELATIVE: found.relative, LARGEST: found.max_abs, MEAN: found.mean_abs}
        if found.same_tokens is not None:
            values[TOKENS] = float(found.same_tokens)
        return Score(values=values, answer=found.answer)

    def metrics(self, samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
        """Return the largest differences, their mean, and for a generator the equal answers."""
        del samples
        found = [_largest(RELATIVE, scores), _largest(LARGEST, scores), _mean(scores)]
        if all(TOKENS in score.values for score in scores):
            found.append(
                accuracy_metric(TOKENS, scores, key="same_tokens", method=_METHODS[TOKENS])
            )
        return tuple(found)


def _largest(name: str, scores: Sequence[Score]) -> Metric:
    value = max(score.values[name] for score in scores)
    return _difference(name, value, 0.0, len(scores))


def _mean(scores: Sequence[Score]) -> Metric:
    value, stderr = mean_and_stderr([score.values[MEAN] for score in scores])
    return _difference(MEAN, value, stderr, len(scores))


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


def _make(options: EvaluationOptions) -> Identity:
    assert options.source_path is not None, "checked before"
    return Identity(
        options=options.identity,
        source_path=options.source_path,
        limit=options.limit,
        seed=options.seed,
    )


def _check(options: EvaluationOptions) -> list[str]:
    source = options.source_path
    problems = []
    if source is None or not (source / "config.json").is_file():
        problems.append(
            "evaluate.tasks has identity, which computes the source with transformers and needs a "
            f"folder with config.json; export.model.checkpoint_path={source} is not one."
        )
    elif find_spec("transformers") is None:
        problems.append("the task identity needs the package transformers; install it.")
    return problems


def _bounds(options: EvaluationOptions) -> dict[str, Bound]:
    """Return the bound that holds without being asked for: what rounding explains."""
    tolerance = options.identity.tolerance
    if tolerance is None:
        tolerance = tolerance_of(options.types)
    return {RELATIVE: Bound(max=tolerance)}


def _remedy(options: EvaluationOptions) -> str:
    """Return the command that names the layer and the tensor behind a deviation."""
    words = ["python", "-m", "inference.parity"]
    words += ["--checkpoint-path", str(options.source_path)]
    words += ["--ft-dir", str(options.weights_dir or "FOLDER_OF_SHARDS")]
    return f"to find the layer and the tensor: {shlex.join(words)}"


IDENTITY = TaskEntry(
    make=_make,
    metrics=lambda _: _METRICS,
    check=_check,
    only_served=True,
    bounds=_bounds,
    remedy=_remedy,
)
