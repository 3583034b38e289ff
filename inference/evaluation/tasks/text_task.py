"""Tasks whose answer is text, defined in text_tasks.yaml: BoolQ, MNLI, SQuAD and others.

Prompts are sent as text to the ensemble, or for a p-tuned model as token ids after the virtual
tokens. A task with few possible answers can also use log likelihood: the answer is the choice that
is most probable after the prompt.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from pydantic import TypeAdapter

from foundations.files.json_content import Fields
from foundations.files.yaml_content import read_table
from inference.evaluation.options import EvaluationOptions, TextTaskOptions
from inference.evaluation.statistics import mean_metric
from inference.evaluation.task import (
    LOG_PROBS,
    TENSORS,
    DatasetSamples,
    Metrics,
    Prediction,
    Sample,
    Score,
    Task,
    TextGenerator,
)
from inference.evaluation.tasks.datasets import Row, choose_from_file, missing_files
from inference.evaluation.tasks.served_folder import virtual_tokens
from inference.evaluation.tasks.text_tasks import CORPUS, FORMS, SCORES

_LETTER = r"[^\W_]"


@dataclass(frozen=True)
class Measure:
    """A score of an answer; the metric is its mean over all samples.

    Attributes:
        score: one of SCORES, which compares an answer with the correct ones.
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
        rows: the data format, one of FORMS, and its parameters.
        measures: name -> score of each answer; a metric's name is the task's and this one.
        corpus: metrics of CORPUS over all answers, which replace the means of the measures.
        template: the prompt, with the row's fields in braces.
        output_len: tokens to generate.
        grouped: whether there are also metrics for each group of the data.
        choices: answer -> its text after the prompt, for log_likelihood.
        likelihood_template: the prompt for log_likelihood, if it differs.
        letters: a pattern of the letters that the metric supports.
        package: package that the metric needs.
        recipe: instructions to get the data.
    """

    name: str
    rows: Fields
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


_TABLE = read_table(Path(__file__).with_name("text_tasks.yaml"))
TEXT_TASKS = {
    name: TypeAdapter(TextTaskKind).validate_python({"name": name, **values})
    for name, values in _TABLE.items()
}


class TextTask(Task):
    """A text task; stateless, so threads may share it.

    Attributes:
        task_options: the options of this task, `evaluate.<task>`.
    """

    def __init__(self, kind: TextTaskKind, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.kind, self.name, self.grouped = kind, kind.name, kind.grouped
        self.task_options: TextTaskOptions = getattr(options, kind.name)
        names = tuple(f"{self.name}_{each}" for each in kind.measures)
        self.metric_names = kind.corpus or names

    @property
    def needs(self) -> dict[str, str]:
        """Metric -> ability that its requests need; the same for every metric."""
        if self.task_options.method == "log_likelihood":
            return dict.fromkeys(self.metric_names, LOG_PROBS)
        if self._virtual[0] or self.task_options.prompt.append_ids:
            return dict.fromkeys(self.metric_names, TENSORS)
        return {}

    def problems(self) -> Iterator[str]:
        """Yield the problems of the task's options, missing files and missing packages."""
        kind, task_options, key = self.kind, self.task_options, f"evaluate.{self.name}"
        yield from missing_files(self.name, task_options, "data_path", "target_path")
        if task_options.data_path is None:
            yield (
                f"{key}.data_path is needed for the task {self.name}. To get the data: "
                f"{kind.recipe}"
            )
        try:
            (task_options.template or "").format_map(defaultdict(str))
        except (ValueError, AttributeError, LookupError) as error:
            yield (
                f"{key}.template is not a text with names of fields in braces ({error}); write a "
                "brace of the text itself twice."
            )
        if task_options.target_path is not None and kind.name != "translation":
            yield f"{key}.target_path has no meaning; only translation reads two files."
        if task_options.method == "log_likelihood" and not kind.choices:
            yield f"{key}.method=log_likelihood needs a task with few answers, such as boolq."
        if kind.package and find_spec(kind.package) is None:
            yield (
                f"the task {kind.name} needs the package {kind.package}: pip install "
                f"{kind.package.replace('_', '-')}."
            )
        if task_options.method == "log_likelihood" and (
            task_options.prompt.append_ids or task_options.prompt.task_id
        ):
            yield f"{key}.prompt cannot be used with method=log_likelihood."
        try:
            _ = self._virtual
        except ValueError as error:
            yield str(error)

    @cached_property
    def _virtual(self) -> tuple[range, int | None]:
        """The ids of the virtual tokens in front of prompts, and the number of their table."""
        return virtual_tokens(self.name, self.task_options.prompt, self.options.weights_dir)

    def prepare(self) -> DatasetSamples:
        """Read the data and format the prompts.

        Raises:
            ValueError: the data has another format, lacks a field of the template, or is in a
                script that the metric cannot score.
        """
        assert self.task_options.data_path is not None, "checked before"
        path = self.task_options.data_path
        template = self.task_options.template or self.kind.template
        if self.task_options.template is None and self.task_options.method == "log_likelihood":
            template = self.kind.likelihood_template or template
        rows = FORMS[self.kind.rows["form"]](path, self.task_options, self.kind.rows)
        self._check_script(rows, path)
        samples = [self._sample(index, row, template, path) for index, row in enumerate(rows)]
        return choose_from_file(samples, self.options, path)

    def _check_script(self, rows: Sequence[Row], path: Path) -> None:
        """Refuse references in which the metric ignores most letters."""
        text = "".join(row.targets[0] for row in rows).lower()
        letters, known = (
            len(re.findall(pattern, text)) for pattern in (_LETTER, self.kind.letters)
        )
        if 2 * known < letters:
            raise ValueError(
                f"{path}: {letters - known:,} of {letters:,} letters of the references are in a "
                f"script that the metric of {self.name} ignores, so its scores would be "
                "meaningless; use a task of lm-eval for the language, "
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
        """Get the model's answer and score it."""
        answer = self._answer(sample, model)
        values = {
            f"{self.name}_{name}": SCORES[measure.score](answer, sample.all_targets)
            for name, measure in self.kind.measures.items()
        }
        return Score(values=values, answer=answer)

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the task's metrics over all samples, then those over each group."""
        if self.kind.corpus:
            return tuple(CORPUS[metric](found) for metric in self.kind.corpus)
        metrics = []
        for group in ("", *sorted({each.group for each in found} - {""})):
            of, suffix = (f", of {group}", f"_{group}") if group else ("", "")
            members = [each for each in found if group in ("", each.group)]
            for name, measure in self.kind.measures.items():
                value = f"{self.name}_{name}"
                metrics.append(
                    mean_metric(
                        value + suffix,
                        members,
                        value=value,
                        is_share=measure.is_share,
                        key=measure.key + suffix,
                        method=measure.method + of,
                        group=group,
                    )
                )
        return tuple(metrics)

    def _answer(self, sample: Sample, model: TextGenerator) -> str:
        if self.task_options.method == "log_likelihood":
            context = model.encode(sample.text)
            scores = {
                answer: model.context_log_prob(context + model.encode(text))
                for answer, text in self.kind.choices.items()
            }
            return max(scores, key=lambda answer: scores[answer])
        output_len = self.task_options.output_len or self.kind.output_len
        (virtual, number), after = self._virtual, self.task_options.prompt.append_ids
        if not virtual and not after:
            return model.complete_text(sample.text, output_len=output_len).text
        ids = (*virtual, *model.encode(sample.text), *after)
        tensors = {"prompt_learning_task_name_ids": number} if virtual else {}
        answer = model.complete_ids(ids, output_len=output_len, tensors=tensors)
        return model.decode_answer(answer)
