"""Tasks whose answer is text, as text_tasks.yaml defines them: BoolQ, MNLI, SQuAD and others.

Prompts go as text through the ensemble; for a model tuned by p-tuning they go as token ids
with the virtual tokens in front. A task with few answers can also be asked by log likelihood: the
answer is the choice that the model finds most probable after the prompt.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from foundations.files.yaml_content import read_own_table
from inference.evaluation.options import EvaluationOptions, TextTaskOptions
from inference.evaluation.statistics import mean_metric
from inference.evaluation.task import (
    LOG_PROBS,
    TENSORS,
    Drawn,
    Metrics,
    Prediction,
    Sample,
    Score,
    Task,
    TextGenerator,
)
from inference.evaluation.tasks.datasets import Row, drawn_from_file, missing_files
from inference.evaluation.tasks.served_folder import virtual_tokens
from inference.evaluation.tasks.text_tasks import CORPUS, FORMS, SCORES

_LETTER = r"[^\W_]"


@dataclass(frozen=True)
class Measure:
    """One figure of an answer; the metric is its mean over all samples.

    Attributes:
        score: of an answer against the right ones, one of SCORES.
        key: its short name, as evaluation harnesses write it.
        is_share: whether each answer scores 0 or 1.
    """

    score: str
    key: str = ""
    method: str = ""
    is_share: bool = True


@dataclass(frozen=True)
class TextTaskKind:
    """The definition of one task.

    Attributes:
        rows: the form of its data files, one of FORMS, and what that needs to read them.
        measures: of each answer; their names stand behind the task's.
        corpus: metrics of all answers together, of CORPUS, in place of the measures' means.
        template: its prompt, with the row's fields in braces.
        output_len: tokens to generate.
        grouped: whether they are summed up over each group of the data too.
        choices: the answers there are, as they follow the prompt; needed for log_likelihood.
        likelihood_template: its prompt for log_likelihood, where that differs.
        letters: a pattern of the letters that its metric counts.
        package: what its metric needs installed.
        recipe: how a person gets the data.
    """

    name: str
    rows: dict[str, Any]
    measures: dict[str, Measure]
    template: str
    output_len: int
    corpus: tuple[str, ...] = ()
    grouped: bool = False
    choices: dict[str, str] = field(default_factory=dict)
    likelihood_template: str = ""
    letters: str = _LETTER
    package: str = ""
    recipe: str = ""


_TABLE = read_own_table(Path(__file__).with_name("text_tasks.yaml"))
TEXT_TASKS = {
    name: TypeAdapter(TextTaskKind).validate_python({"name": name, **values})
    for name, values in _TABLE.items()
}


class TextTask(Task):
    """A text task; stateless, so threads may share it.

    Attributes:
        own: the options of this task alone.
    """

    def __init__(self, kind: TextTaskKind, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.kind, self.name, self.grouped = kind, kind.name, kind.grouped
        self.own: TextTaskOptions = getattr(options, kind.name)
        names = tuple(f"{self.name}_{each}" for each in kind.measures)
        self.metric_names = kind.corpus or names

    @property
    def needs(self) -> dict[str, str]:
        """The ability that its way of asking needs, for every metric."""
        if self.own.method == "log_likelihood":
            return dict.fromkeys(self.metric_names, LOG_PROBS)
        if self._virtual[0] or self.own.prompt.append_ids:
            return dict.fromkeys(self.metric_names, TENSORS)
        return {}

    def problems(self) -> list[str]:
        """Return what is wrong with the task's options, and files or packages it lacks."""
        kind, own, key = self.kind, self.own, f"evaluate.{self.name}"
        problems = missing_files(self.name, own, "data_path", "target_path")
        if own.data_path is None:
            problems.append(
                f"{key}.data_path is needed for the task {self.name}. To get the data: "
                f"{kind.recipe}"
            )
        try:
            (own.template or "").format_map(defaultdict(str))
        except (ValueError, AttributeError, LookupError) as error:
            problems.append(
                f"{key}.template is not a text with names of fields in braces ({error}); write a "
                "brace of the text itself twice."
            )
        if own.target_path is not None and kind.name != "translation":
            problems.append(f"{key}.target_path has no meaning; only translation reads two files.")
        if own.method == "log_likelihood" and not kind.choices:
            problems.append(
                f"{key}.method=log_likelihood needs a task with few answers, such as boolq."
            )
        if kind.package and find_spec(kind.package) is None:
            problems.append(
                f"the task {kind.name} needs the package {kind.package}: pip install "
                f"{kind.package.replace('_', '-')}."
            )
        if own.method == "log_likelihood" and (own.prompt.append_ids or own.prompt.task_id):
            problems.append(f"{key}.prompt cannot be used with method=log_likelihood.")
        try:
            _ = self._virtual
        except ValueError as error:
            problems.append(str(error))
        return problems

    @cached_property
    def _virtual(self) -> tuple[range, int | None]:
        """The ids of the virtual tokens before each prompt, and the number of their table."""
        return virtual_tokens(self.name, self.own.prompt, self.options.weights_dir)

    def prepare(self) -> Drawn:
        """Read the data and make the prompts.

        Raises:
            ValueError: the data is not of the task's form, in a script that its metric
                cannot score, or lacks a field of the template.
        """
        assert self.own.data_path is not None, "checked before"
        path = Path(self.own.data_path)
        template = self.own.template or self.kind.template
        if self.own.template is None and self.own.method == "log_likelihood":
            template = self.kind.likelihood_template or template
        rows = FORMS[self.kind.rows["form"]](path, self.own, self.kind.rows)
        self._check_script(rows, path)
        samples = [self._sample(index, row, template, path) for index, row in enumerate(rows)]
        return drawn_from_file(samples, self.options, path)

    def _check_script(self, rows: Sequence[Row], path: Path) -> None:
        """Refuse references most of whose letters are none to the metric."""
        text = "".join(row.targets[0] for row in rows).lower()
        letters, known = (len(re.findall(each, text)) for each in (_LETTER, self.kind.letters))
        if 2 * known < letters:
            raise ValueError(
                f"{path}: {letters - known:,} of {letters:,} letters of the references are of a "
                f"script that the metric of {self.name} does not read, so that its scores would "
                "mean nothing; take a task of lm-eval that is made for the language, as "
                "evaluate.tasks=[harness:NAME]."
            )

    def _sample(self, index: int, row: Row, template: str, path: Path) -> Sample:
        try:
            text = template.format_map(row.fields)
        except KeyError as error:
            raise ValueError(
                f"{path}, row {index + 1}: no field {error} for the template {template!r}; it has "
                f"{', '.join(row.fields)}."
            ) from None
        group = row.group if self.kind.grouped else ""
        return Sample(index, text, target=row.targets[0], targets=row.targets, group=group)

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Ask the model for one answer and score it."""
        answer = self._answer(sample, model)
        values = {
            f"{self.name}_{name}": SCORES[each.score](answer, sample.all_targets)
            for name, each in self.kind.measures.items()
        }
        return Score(values=values, answer=answer)

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the task's metrics over all samples, then those over each group there is."""
        if self.kind.corpus:
            return tuple(CORPUS[metric](found) for metric in self.kind.corpus)
        metrics = []
        for group in ("", *sorted({each.group for each in found} - {""})):
            of, end = (f", of {group}", f"_{group}") if group else ("", "")
            own = [each for each in found if group in ("", each.group)]
            for name, each in self.kind.measures.items():
                value = f"{self.name}_{name}"
                words = {"key": each.key + end, "method": each.method + of, "group": group}
                share = each.is_share
                metrics.append(mean_metric(value + end, own, value=value, is_share=share, **words))
        return tuple(metrics)

    def _answer(self, sample: Sample, model: TextGenerator) -> str:
        if self.own.method == "log_likelihood":
            context = model.encode(sample.text)
            scores = {
                answer: model.context_log_prob(context + model.encode(words))
                for answer, words in self.kind.choices.items()
            }
            return max(scores, key=lambda answer: scores[answer])
        output_len = self.own.output_len or self.kind.output_len
        (virtual, number), after = self._virtual, self.own.prompt.append_ids
        if not virtual and not after:
            return model.complete_text(sample.text, output_len=output_len).text
        ids = (*virtual, *model.encode(sample.text), *after)
        tensors = {"prompt_learning_task_name_ids": number} if virtual else {}
        answer = model.complete_ids(ids, output_len=output_len, tensors=tensors)
        return model.decode_answer(answer)
