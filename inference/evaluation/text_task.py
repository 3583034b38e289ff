"""Tasks whose answer is text: BoolQ, MNLI, XNLI, SQuAD, translation, summarisation.

Each is a row of TEXT_TASKS: how its data is read and its prompt is made, and how an answer is
scored. Prompts go as text through the ensemble; for a model tuned by p-tuning they go as token ids
with the virtual tokens in front. A task with few answers can also be asked by log likelihood: the
answer is the choice that the model finds most probable after the prompt.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.evaluation.datasets import draw, sha256_of
from inference.evaluation.metrics import accuracy_metric, mean_metric
from inference.evaluation.options import TextTaskOptions
from inference.evaluation.rows import (
    Row,
    boolq_rows,
    nli_rows,
    read_rows,
    squad_rows,
    summarization_rows,
    translation_rows,
)
from inference.evaluation.statistics import Z_95
from inference.evaluation.task import Dataset, Metric, RequestTensors, Sample, Score, TextGenerator
from inference.evaluation.text_scores import (
    ROUGE_TYPES,
    corpus_bleu,
    equal,
    exact_match,
    first_sentences,
    rouge,
    sentence_bleu,
    token_f1,
)

ScoreAnswer = Callable[[str, Sample], dict[str, float]]
SumUp = Callable[[Sequence[Sample], Sequence[Score]], tuple[Metric, ...]]
_P_TUNING = 3  # request_prompt_type of the contract


@dataclass(frozen=True)
class TextTaskKind:
    """What one task is.

    Attributes:
        read: the rows of its data files.
        template: its prompt, with the row's fields in braces.
        output_len: tokens to generate.
        score: quantities of one answer; names of metrics.
        sum_up: metrics over all samples.
        choices: the answers there are, as they follow the prompt; needed for log_likelihood.
        likelihood_template: its prompt for log_likelihood, where that differs.
        package: what its metric needs installed.
    """

    name: str
    read: Callable[[Path, TextTaskOptions], list[Row]]
    template: str
    output_len: int
    score: ScoreAnswer
    sum_up: SumUp
    metrics: tuple[str, ...]
    choices: Mapping[str, str] = field(default_factory=dict)
    likelihood_template: str = ""
    package: str = ""


@dataclass(frozen=True)
class TextTask:
    """A text task with its options; stateless, so threads may share it."""

    kind: TextTaskKind
    options: TextTaskOptions
    limit: int | None = None
    seed: int = 1234
    version: int = 1

    @property
    def name(self) -> str:
        """Name in the table of tasks."""
        return self.kind.name

    def prepare(self) -> tuple[Dataset, Sequence[Sample]]:
        """Read the data and make the prompts.

        Raises:
            ValueError: the data is not of the task's form, or lacks a field of the template.
        """
        path = self.options.data_path
        if path is None:
            raise ValueError(f"evaluate.{self.name}.data_path is needed for the task {self.name}.")
        template = self.options.template or self._own_template()
        rows = self.kind.read(path, self.options)
        samples = [_sample(index, row, template, path) for index, row in enumerate(rows)]
        chosen = draw(samples, limit=self.limit, seed=self.seed)
        limited = len(chosen) < len(samples)
        dataset = Dataset(
            name=path.name,
            path=str(path),
            sha256=sha256_of(path),
            total=len(samples),
            count=len(chosen),
            limit=self.limit if limited else None,
            seed=self.seed if limited else None,
        )
        return dataset, chosen

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Ask the model for one answer and score it."""
        answer = self._answer(sample, model)
        return Score(values=self.kind.score(answer, sample), answer=answer)

    def metrics(self, samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
        """Return the task's metrics over all samples."""
        return self.kind.sum_up(samples, scores)

    def _own_template(self) -> str:
        if self.options.method == "log_likelihood" and self.kind.likelihood_template:
            return self.kind.likelihood_template
        return self.kind.template

    def _answer(self, sample: Sample, model: TextGenerator) -> str:
        if self.options.method == "log_likelihood":
            return _most_probable(sample.text, self.kind.choices, model)
        output_len = self.options.output_len or self.kind.output_len
        prompt = self.options.prompt
        if prompt.length == 0:
            return model.complete_text(sample.text, output_len=output_len).text
        virtual = range(prompt.start_id, prompt.start_id + prompt.length)
        ids = (*virtual, *model.encode(sample.text), *prompt.append_ids)
        answer = model.complete_ids(ids, output_len=output_len, tensors=self._prompt_tensors())
        return model.decode_answer(answer)

    def _prompt_tensors(self) -> RequestTensors:
        prompt = self.options.prompt
        if prompt.table_path is None:
            return {"prompt_learning_task_name_ids": prompt.task_id or 0}
        return {
            "request_prompt_embedding": read_table(prompt.table_path, rows=prompt.length),
            "request_prompt_lengths": prompt.length,
            "request_prompt_type": _P_TUNING,
        }


def read_table(path: Path, *, rows: int) -> list[list[float]]:
    """Return a prompt table of `rows` virtual tokens, stored as little-endian fp32.

    Raises:
        ValueError: the file does not hold so many rows.
    """
    values = array.array("f")
    values.frombytes(path.read_bytes())
    if sys.byteorder == "big":
        values.byteswap()
    if not values or len(values) % rows:
        raise ValueError(f"{path} holds {len(values)} values, which are not {rows} rows.")
    width = len(values) // rows
    return [values[start : start + width].tolist() for start in range(0, len(values), width)]


def _sample(index: int, row: Row, template: str, path: Path) -> Sample:
    try:
        text = template.format_map(row.fields)
    except KeyError as error:
        raise ValueError(
            f"{path}, row {index}: no field {error} for the template {template!r}; it has "
            f"{', '.join(row.fields)}."
        ) from None
    return Sample(
        index=index, text=text, target=row.targets[0], targets=row.targets, group=row.group
    )


def _most_probable(text: str, choices: Mapping[str, str], model: TextGenerator) -> str:
    """Return the answer whose words have the highest log probability after `text`."""
    context = model.encode(text)
    scores = {
        answer: model.context_log_prob(context + model.encode(words))
        for answer, words in choices.items()
    }
    return max(scores, key=lambda answer: scores[answer])


def _accuracy(name: str) -> SumUp:
    """Return what sums up an accuracy, over all samples and over each group there is."""
    method = "share of answers that equal the right one"

    def sum_up(samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
        groups = sorted({sample.group for sample in samples} - {""})
        parts = [
            accuracy_metric(
                f"{name}_{group}",
                [s for sample, s in zip(samples, scores, strict=True) if sample.group == group],
                key=f"acc_{group}",
                method=f"{method}, of {group}",
                value=name,
            )
            for group in groups
        ]
        return (accuracy_metric(name, scores, key="acc", method=method), *parts)

    return sum_up


def _squad_score(answer: str, sample: Sample) -> dict[str, float]:
    return {
        "squad_exact_match": exact_match(answer, sample.all_targets),
        "squad_f1": token_f1(answer, sample.all_targets),
    }


def _squad_metrics(samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
    del samples
    matches = "share of answers equal to a right one without case, punctuation and articles"
    shared = "mean F1 of the words that answer and best right answer share"
    return (
        accuracy_metric("squad_exact_match", scores, key="em", method=matches),
        mean_metric("squad_f1", scores, key="f1", method=shared),
    )


def _rouge_score(answer: str, sample: Sample) -> dict[str, float]:
    found = rouge(first_sentences(answer), sample.target)
    return {f"summarization_{kind}": value for kind, value in found.items()}


def _rouge_metrics(samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
    del samples
    method = "mean F-measure of rouge-score, of the first four sentences"
    return tuple(
        mean_metric(f"summarization_{kind}", scores, key=kind, method=method)
        for kind in ROUGE_TYPES
    )


def _bleu_score(answer: str, sample: Sample) -> dict[str, float]:
    return {"translation_sentence_bleu": sentence_bleu(answer, sample.target)}


def _bleu_metrics(samples: Sequence[Sample], scores: Sequence[Score]) -> tuple[Metric, ...]:
    value, half = corpus_bleu(
        [score.answer for score in scores], [sample.target for sample in samples]
    )
    metric = Metric(
        name="translation_bleu",
        key="bleu",
        value=value,
        stderr=half / Z_95,
        low=max(0.0, value - half),
        high=min(100.0, value + half),
        count=len(scores),
        unit="BLEU",
        method="sacrebleu's corpus score, 0 to 100",
        sample_value="translation_sentence_bleu",
        from_samples=False,
    )
    return (metric,)


def _classification(
    name: str,
    rows: Callable[[Sequence[Mapping[str, Any]], Path], list[Row]],
    *,
    template: str,
    **others: Any,
) -> TextTaskKind:
    """Return a task with few answers, of which one is right; its metric is the accuracy."""
    metric = f"{name}_accuracy"
    return TextTaskKind(
        name=name,
        read=lambda path, _: rows(read_rows(path), path),
        template=template,
        output_len=10,
        score=lambda answer, sample: {metric: equal(answer, sample.all_targets)},
        sum_up=_accuracy(metric),
        metrics=(metric,),
        **others,
    )


_KINDS = (
    _classification(
        "boolq",
        boolq_rows,
        template="{passage}{question}",
        choices={"true": " yes", "false": " no"},
        likelihood_template="{passage}\nQuestion: {question}\nAnswer:",
    ),
    _classification("mnli", nli_rows, template="mnli hypothesis: {hypothesis} premise: {premise}"),
    _classification("xnli", nli_rows, template="xnli: premise: {premise} hypothesis: {hypothesis}"),
    TextTaskKind(
        name="squad",
        read=lambda path, _: squad_rows(path),
        template="question: {question} context: {context}",
        output_len=32,
        score=_squad_score,
        sum_up=_squad_metrics,
        metrics=("squad_exact_match", "squad_f1"),
    ),
    TextTaskKind(
        name="translation",
        read=lambda path, options: translation_rows(path, options.target_path),
        template="translate English to German: {source}",
        output_len=128,
        score=_bleu_score,
        sum_up=_bleu_metrics,
        metrics=("translation_bleu",),
        package="sacrebleu",
    ),
    TextTaskKind(
        name="summarization",
        read=lambda path, _: summarization_rows(read_rows(path), path),
        template="summarize: {article}",
        output_len=200,
        score=_rouge_score,
        sum_up=_rouge_metrics,
        metrics=tuple(f"summarization_{kind}" for kind in ROUGE_TYPES),
        package="rouge_score",
    ),
)
TEXT_TASKS: dict[str, TextTaskKind] = {kind.name: kind for kind in _KINDS}
# Of these there is one more for each group of the data, `<metric>_<group>`, such as a language.
GROUPED_METRICS = ("mnli_accuracy", "xnli_accuracy")
