"""The protocols of a task and of the model it asks, and the records they exchange.

Tasks and models meet only here: a task sees token ids and text, never Triton; a model never
sees a metric. Standard library only, so that options can be checked on a login node.
"""

import abc
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference.evaluation.options import EvaluationOptions

Ids = Sequence[int]  # token ids, as a caller has them
TokenIds = tuple[int, ...]  # those of a text, or of an answer
Values = Mapping[str, float]  # the quantities of one sample by name


@dataclass(frozen=True)
class Sample:
    """One question of a data set.

    Attributes:
        index: line of the data set, from 0; the same whatever the limit and the seed.
        text: what the model is given, as a person would read it.
        target: the right answer, as a person would read it.
        targets: all right answers where there are several.
        group: the part of the data set that it belongs to, such as a language.
    """

    index: int
    text: str
    target: str
    targets: tuple[str, ...] = ()
    group: str = ""

    @property
    def all_targets(self) -> tuple[str, ...]:
        """Every right answer."""
        return self.targets or (self.target,)


def sample_ids(samples: Iterable[Sample]) -> list[str]:
    """Return an id of each sample's content; the second of equal ones ends in -2."""
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
        values: each per-sample quantity by name; accuracies are 0.0 or 1.0.
        answer: what the model said, for the report.
    """

    values: Values
    answer: str


@dataclass(frozen=True)
class Prediction:
    """One sample as asked and answered; a line of predictions.jsonl.

    Attributes:
        id: of the sample's content, by which runs are compared.
        values: per-sample quantities by name.
        baseline: the baseline's values of the same names, where there are any.
        seconds: time the sample's requests took together.
        group: the part of the data set that the sample belongs to.
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
        """The values that differ from the baseline's, each after the baseline's."""
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
        sample_value: the per-sample quantity that it is made of.
        scale: "mean" where the value is the mean of those quantities, "exp" where it is the
            exponential of the mean's negative; empty where they alone do not give it, as of BLEU.
        weight: the per-sample quantity by which that mean is weighted, such as a number of tokens.
        group: the part of the data set that it covers; empty where it covers all.
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
    """The origin of the samples, by which a figure can be traced and repeated.

    Attributes:
        total: samples in the file; `count` of them were asked.
        limit, seed: how those were chosen; a null limit asks them all, in file order.
    """

    name: str
    path: str
    sha256: str
    total: int
    count: int
    limit: int | None = None
    seed: int | None = None


Drawn = tuple[Dataset, Sequence[Sample]]  # what is asked, and the data set that it is drawn from
Metrics = tuple[Metric, ...]


@dataclass(frozen=True)
class Completion:
    """The text that follows a prompt, and the number of its tokens."""

    text: str
    generated: int = 0


# Contract tensors sent with the prompt, by name: one value or array, the same for every row.
RequestTensors = Mapping[str, Any]


# Abilities of a model that a metric may need, and that not every server has.
TOKEN_IDS, LOG_PROBS, TENSORS = "token ids", "log probabilities", "tensors"


class EvaluationError(RuntimeError):
    """An evaluation that could not be completed; the message says why and how far it came."""


class RequestFailedError(EvaluationError):
    """The model did not answer one request: refused, timed out, or the server is gone."""


class RefusedRequestError(RequestFailedError):
    """The server refused what a request asks; others may ask less."""


class PutOffError(RequestFailedError):
    """The server is too busy or not there at the moment; the request may be sent again.

    Attributes:
        after_s: seconds that the server asks to wait; None where it names none.
        is_lost: the connection was lost, so that no server may be there.
    """

    def __init__(
        self, message: str, *, after_s: float | None = None, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.after_s, self.is_lost = after_s, is_lost


class ImpossibleFigureError(EvaluationError):
    """A server's answer cannot be true; whatever else it says is not to be trusted either."""


class Tally:
    """The ends of requests, counted by several threads.

    `stop` and `length` are answers that the model ended, and that were as long as was asked for;
    `failed` are requests without an answer, `retried` those that were sent again.
    """

    NAMES = ("stop", "length", "failed", "retried")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[str]()

    def count(self, name: str) -> None:
        """Count one request more under one of NAMES."""
        with self._lock:
            self._counts[name] += 1

    def counts(self) -> Counter[str]:
        """Return what was counted so far."""
        with self._lock:
            return self._counts.copy()


class TextGenerator(Protocol):
    """A model as a task asks it; safe to call from several threads.

    Requests raise RequestFailedError: refused, failed, not answered in time, or not possible, which
    those with a body here are unless a model says otherwise. A model that knows how its answers
    ended has a `tally` of them.
    """

    @property
    def streams(self) -> bool:
        """Return whether answers come token by token."""
        return False

    def check_unchanged(self) -> None:
        """Raise EvaluationError if its server is known to serve another model than before."""
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
        """Return the greedy tokens after each row, asked in one request where that is possible.

        `each_frame` is called for every response of a model that streams, as it comes.
        """
        del each_frame
        return [self.complete_ids(row, output_len=output_len) for row in rows]

    def context_log_prob(self, input_ids: Ids) -> float:
        """Return the natural log probability of `input_ids`, the first token given."""
        ...

    def input_names(self) -> Collection[str]:
        """Return the inputs that the model declares."""
        return ("request_output_len",)

    def infer(self, tensors: RequestTensors, outputs: Sequence[str]) -> Mapping[str, Any]:
        """Return outputs of the model for a request of contract tensors, batch axis first."""
        raise RequestFailedError(f"there are no tensors ({', '.join((*tensors, *outputs))}).")


def added_text(decode: Callable[[Ids], str], before: Ids, ids: Ids) -> str:
    """Return the text that `ids` add to those before them; some decode otherwise when alone."""
    whole, context = decode((*before, *ids)), decode(before) if before else ""
    return whole[len(context) :] if whole.startswith(context) else decode(ids)


def generates(model: TextGenerator) -> bool:
    """Return whether a model answers with tokens, as encoders do not."""
    return not {"request_output_len", "max_output_len"}.isdisjoint(model.input_names())


class Task(abc.ABC):
    """A data set, the requests that answer one of its samples, and the metrics over all.

    It is made of options that may be wrong in what `problems` names.

    Attributes:
        name: in the table of tasks.
        metric_names: the metrics that the options ask for, without those of groups.
        version: grows whenever the same answers would give another figure.
        grouped: whether there is one more metric for each group of the data.
    """

    name: str
    metric_names: tuple[str, ...]
    version = 1
    grouped = False

    @property
    def reused(self) -> int:
        """The replies of an earlier run that stood for requests that it sends by itself."""
        return 0

    @property
    def tally(self) -> Tally | None:
        """The ends of requests that it sends by itself; None where it asks the model alone."""
        return None

    def __init__(self, options: EvaluationOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def problems(self) -> list[str]:
        """Return every problem of the task's options, in the configuration's names."""

    def data_problem(self) -> str:
        """Return why its data is not at hand; empty where it is."""
        return ""

    @abc.abstractmethod
    def prepare(self) -> Drawn:
        """Read and check the data; raises ValueError where it cannot be used."""

    def start(self) -> None:
        """Ask what is asked once, before the first sample. Raises EvaluationError."""
        return

    @abc.abstractmethod
    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Ask the model about one sample; called from several threads at once."""

    @abc.abstractmethod
    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the figures over all samples, the most important first."""

    @property
    def needs(self) -> Mapping[str, str]:
        """The ability that each metric needs of a model, for those that need one.

        A task leaves out metrics that need one of `options.lacks`; where all need the same, the
        task as a whole is left out.
        """
        return {}
