"""The protocols of a task and of a model, and the records that they exchange.

This is their only interface: a task sees token ids and text, never Triton; a model never sees a
metric. Standard library only, so that options can be checked on a login node.
"""

import abc
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foundations.files.json_content import Table
from inference.evaluation.options import EvaluationOptions

Ids = Sequence[int]  # token ids, as an argument
TokenIds = tuple[int, ...]  # token ids, as a result
Values = Mapping[str, float]  # the quantities of one sample by name


@dataclass(frozen=True)
class Sample:
    """One question of a data set.

    Attributes:
        index: line of the data set, from 0; independent of limit and seed.
        text: the model's input, as readable text.
        target: the correct answer, as readable text.
        targets: all correct answers, if there are several.
        group: the part of the data set to which it belongs, such as a language.
    """

    index: int
    text: str
    target: str
    targets: tuple[str, ...] = ()
    group: str = ""

    @property
    def all_targets(self) -> tuple[str, ...]:
        """All correct answers."""
        return self.targets or (self.target,)


def sample_ids(samples: Iterable[Sample]) -> list[str]:
    """Return an id for each sample's content; the second of two equal samples ends in -2."""
    seen: dict[str, int] = {}
    found = []
    for sample in samples:
        content = json.dumps([sample.text, sample.all_targets, sample.group])
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        seen[digest] = seen.get(digest, 0) + 1
        found.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return found


@dataclass(frozen=True)
class Score:
    """The score of one sample.

    Attributes:
        values: per-sample quantities by name; accuracies are 0.0 or 1.0.
        answer: the model's answer, for the report.
    """

    values: Values
    answer: str


@dataclass(frozen=True)
class Prediction:
    """A sample with its answer; a line of predictions.jsonl.

    Attributes:
        id: identifies the sample's content when runs are compared.
        values: per-sample quantities by name.
        baseline: the baseline's values of the same names, if any.
        seconds: total time of the sample's requests.
        group: the part of the data set to which the sample belongs.
    """

    task: str
    index: int
    text: str = ""
    target: str = ""
    answer: str = ""
    values: Values = field(default_factory=dict)
    seconds: float = 0.0
    baseline: Values = field(default_factory=dict)
    id: str = ""
    group: str = ""

    @property
    def changes(self) -> dict[str, tuple[float, float]]:
        """The values that differ from the baseline's, as (baseline, this run)."""
        return {
            name: (old, self.values[name])
            for name, old in self.baseline.items()
            if old != self.values.get(name, old)
        }


@dataclass(frozen=True)
class Metric:
    """One figure of a task over all its samples; fractions are 0 to 1, never percent.

    Attributes:
        name: the metric's full name, unique in a report, such as `lambada_last_word`.
        key: its short name among the metrics of its task, as evaluation harnesses write it.
        method: how it was measured, in one sentence.
        sample_value: the per-sample quantity from which it is computed.
        scale: "mean" if the value is the mean of those quantities, "exp" if it is the exponential
            of the negative mean; empty if they do not determine it, as for BLEU.
        weight: the per-sample quantity that weights the mean, such as a number of tokens.
        group: the part of the data set that it covers; empty for all of it.
        low, high: the ends of the 95% confidence interval.
        stderr: standard error of `value`, in its unit.
    """

    name: str
    key: str
    value: float
    stderr: float
    low: float
    high: float
    count: int
    unit: str = "fraction"
    higher_is_better: bool = True
    method: str = ""
    sample_value: str = ""
    scale: str = ""
    weight: str = ""
    group: str = ""


@dataclass(frozen=True)
class Dataset:
    """The origin of the samples, with which a result can be reproduced.

    Attributes:
        total: samples in the file; `count` of them were evaluated.
        limit, seed: how those were chosen; a null limit evaluates all, in file order.
    """

    name: str
    path: str
    sha256: str
    total: int
    count: int
    limit: int | None = None
    seed: int | None = None


DatasetSamples = tuple[Dataset, Sequence[Sample]]  # a data set, and its chosen samples
Metrics = tuple[Metric, ...]


@dataclass(frozen=True)
class Completion:
    """The text that follows a prompt, and the number of its tokens."""

    text: str
    generated: int = 0


# Name of a contract tensor -> its value or array, the same for every row of a request.
RequestTensors = Table


# Abilities that a metric may need and that a server may lack.
TOKEN_IDS, LOG_PROBS, TENSORS = "token ids", "log probabilities", "tensors"


class EvaluationError(RuntimeError):
    """An evaluation that could not be completed; the message says why, and how far it got."""


class RequestFailedError(EvaluationError):
    """The model did not answer a request: it was refused, timed out, or the server is gone."""


class RefusedRequestError(RequestFailedError):
    """The server refused a request because of its content; a simpler one may succeed."""


class RetryableError(RequestFailedError):
    """The server is busy or unreachable at the moment; the request may be sent again.

    Attributes:
        after_s: seconds that the server asks to wait; None if it states none.
        is_lost: the connection was lost, so the server may be gone.
    """

    def __init__(
        self, message: str, *, after_s: float | None = None, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.after_s, self.is_lost = after_s, is_lost


class ImplausibleAnswerError(EvaluationError):
    """A server's answer cannot be true, so none of its answers can be trusted."""


class Tally:
    """Thread-safe counts of the outcomes of requests.

    `stop` are answers that the model ended, `length` those of the full requested length, `failed`
    requests without an answer, `retried` requests that were sent again.
    """

    NAMES = ("stop", "length", "failed", "retried")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    def count(self, name: str) -> None:
        """Add 1 to the count of one of NAMES."""
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> Counter[str]:
        """Return a copy of the counts."""
        with self._lock:
            return self._counts.copy()


class TextGenerator(Protocol):
    """A model as a task uses it; safe to call from several threads.

    Requests raise RequestFailedError if they are refused, fail or time out, or if the model does
    not support them. A model that knows how its answers ended has a `tally`.
    """

    @property
    def streams(self) -> bool:
        """Return whether answers come token by token."""
        return False

    def check_unchanged(self) -> None:
        """Raise EvaluationError if its server now serves another model, as far as it can tell."""
        return

    def encode(self, text: str) -> TokenIds:
        """Return the token ids of `text`, without special tokens."""
        ...

    def decode(self, ids: Ids) -> str:
        """Return the text of token ids."""
        ...

    def decode_answer(self, ids: Ids) -> str:
        """Return the text of generated tokens, up to the end token."""
        return self.decode(ids)

    def complete_text(self, prompt: str, *, output_len: int) -> Completion:
        """Return the text of `output_len` greedy tokens after `prompt`, without the prompt."""
        ids = self.encode(prompt)
        answer = self.complete_ids(ids, output_len=output_len)
        return Completion(added_text(self.decode, ids, answer), len(answer))

    def complete_ids(
        self, input_ids: Ids, *, output_len: int, tensors: RequestTensors | None = None
    ) -> TokenIds:
        """Return up to `output_len` greedy tokens after `input_ids`, without these."""
        ...

    def complete_rows(
        self,
        rows: Sequence[Ids],
        *,
        output_len: int,
        each_frame: Callable[[], None] | None = None,
    ) -> list[TokenIds]:
        """Return the greedy tokens after each row, from one request if that is possible.

        `each_frame` is called when a response of a streaming model arrives.
        """
        del each_frame
        return [self.complete_ids(row, output_len=output_len) for row in rows]

    def context_log_prob(self, input_ids: Ids) -> float:
        """Return the natural log probability of `input_ids` after their first token."""
        ...

    def input_names(self) -> Collection[str]:
        """Return the inputs that the model declares."""
        return ("request_output_len",)

    def infer(self, tensors: RequestTensors, outputs: Sequence[str]) -> Table:
        """Return outputs of the model for a request of contract tensors, batch axis first."""
        names = ", ".join((*tensors, *outputs))
        raise RequestFailedError(f"the model's protocol has no tensors ({names}).")


def added_text(decode: Callable[[Ids], str], before: Ids, ids: Ids) -> str:
    """Return the text that `ids` add to `before`; decoded alone, tokens may give another text."""
    combined, context = decode((*before, *ids)), decode(before) if before else ""
    return combined[len(context) :] if combined.startswith(context) else decode(ids)


def generates(model: TextGenerator) -> bool:
    """Return whether a model generates tokens; encoders do not."""
    return not {"request_output_len", "max_output_len"}.isdisjoint(model.input_names())


class Task(abc.ABC):
    """A data set, the requests for one of its samples, and the metrics over all samples.

    A task can be created from invalid options; `problems` names what is wrong with them.

    Attributes:
        name: its key in the table of tasks.
        metric_names: the requested metrics, without those of groups.
        version: increases whenever the same answers would give another result.
        grouped: whether there is an additional metric for each group of the data.
    """

    name: str
    metric_names: tuple[str, ...]
    version = 1
    grouped = False

    @property
    def reused(self) -> int:
        """For a task that sends its own requests: those that an earlier run's replies replaced."""
        return 0

    @property
    def tally(self) -> Tally | None:
        """For a task that sends its own requests: their outcomes; None for other tasks."""
        return None

    def __init__(self, options: EvaluationOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def problems(self) -> Iterable[str]:
        """Return every problem of the task's options, by configuration key."""

    def data_problem(self) -> str:
        """Return why its data is missing; empty if it is not."""
        return ""

    @abc.abstractmethod
    def prepare(self) -> DatasetSamples:
        """Read and check the data. Raises ValueError if it cannot be used."""

    def start(self) -> None:
        """Send requests that are needed once, before the first sample. Raises EvaluationError."""
        return

    @abc.abstractmethod
    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Score the model's answer to one sample; called from several threads at once."""

    @abc.abstractmethod
    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the metrics over all samples, the most important first."""

    @property
    def needs(self) -> Mapping[str, str]:
        """Metric -> ability of a model that it needs, for metrics that need one.

        A task leaves out the metrics that need an ability of `options.lacks`. If this leaves none,
        the task as a whole is left out.
        """
        return {}
