"""BoolQ, MNLI, XNLI, SQuAD, translation and summarisation: a row of TEXT_TASKS each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference.evaluation.statistics import Z_95
from inference.evaluation.task import Metric, Sample, Score
from inference.evaluation.tasks.datasets import DataSource
from inference.evaluation.tasks.metrics import accuracy_metric, mean_metric
from inference.evaluation.tasks.rows import (
    Row,
    boolq_rows,
    nli_rows,
    squad_rows,
    summarization_rows,
    translation_rows,
)
from inference.evaluation.tasks.scores import (
    ROUGE_TYPES,
    corpus_bleu,
    equal,
    exact_match,
    first_sentences,
    rouge,
    sentence_bleu,
    token_f1,
)
from inference.evaluation.tasks.text_task import SumUp, TextTaskKind

# The development set of SQuAD 1.1 (CC BY-SA 4.0), the official JSON.
_SQUAD_URL = "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json"
_SQUAD_SHA256 = "95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9"
# The validation set of BoolQ (CC BY-SA 3.0), 3,270 rows, as SuperGLUE publishes it. The authors'
# own address has been seen to give another file.
_BOOLQ = DataSource(
    "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/BoolQ.zip",
    "853fbe7922f70c59629f06a39e8d9ca440c3d740e760fd3b87a5ddf3dcba2436",
    member="BoolQ/val.jsonl",
)


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
                group=group,
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
    rows: Callable[[Path], list[Row]],
    *,
    template: str,
    **others: Any,
) -> TextTaskKind:
    """Return a task with few answers, of which one is right; its metric is the accuracy."""
    metric = f"{name}_accuracy"
    return TextTaskKind(
        name=name,
        read=lambda path, _: rows(path),
        template=template,
        output_len=10,
        score=lambda answer, sample: {metric: equal(answer, sample.all_targets)},
        sum_up=_accuracy(metric),
        metrics=(metric,),
        **others,
    )


def _from_hub(name: str, split: str, file: str, *, config: str = "") -> str:
    """Return the line that makes the file of a data set on the Hugging Face hub."""
    arguments = ", ".join(f'"{each}"' for each in (name, config) if each)
    return (
        f"python -c 'import datasets; datasets.load_dataset({arguments}, "
        f'split="{split}").to_json("{file}")\''
    )


_KINDS = (
    _classification(
        "boolq",
        boolq_rows,
        template="{passage}{question}",
        choices={"true": " yes", "false": " no"},
        likelihood_template="{passage}\nQuestion: {question}\nAnswer:",
        source=_BOOLQ,
    ),
    _classification(
        "mnli",
        nli_rows,
        template="mnli hypothesis: {hypothesis} premise: {premise}",
        grouped=True,
        recipe=_from_hub("nyu-mll/multi_nli", "validation_matched", "mnli.jsonl"),
    ),
    _classification(
        "xnli",
        nli_rows,
        template="xnli: premise: {premise} hypothesis: {hypothesis}",
        grouped=True,
        recipe=_from_hub("facebook/xnli", "test", "xnli.jsonl", config="de")
        + ' (of other languages, "de" is their code; rows may name theirs in a field language)',
    ),
    TextTaskKind(
        name="squad",
        read=lambda path, _: squad_rows(path),
        template="question: {question} context: {context}",
        output_len=32,
        score=_squad_score,
        sum_up=_squad_metrics,
        metrics=("squad_exact_match", "squad_f1"),
        source=DataSource(_SQUAD_URL, _SQUAD_SHA256),
    ),
    TextTaskKind(
        name="translation",
        read=lambda path, options: translation_rows(
            path, None if options.target_path is None else Path(options.target_path)
        ),
        template="translate English to German: {source}",
        output_len=128,
        score=_bleu_score,
        sum_up=_bleu_metrics,
        metrics=("translation_bleu",),
        package="sacrebleu",
        recipe="sacrebleu -t wmt14 -l en-de --echo src > en.txt, and with --echo ref > de.txt for "
        "evaluate.translation.target_path",
    ),
    TextTaskKind(
        name="summarization",
        read=lambda path, _: summarization_rows(path),
        template="summarize: {article}",
        output_len=200,
        score=_rouge_score,
        sum_up=_rouge_metrics,
        metrics=tuple(f"summarization_{kind}" for kind in ROUGE_TYPES),
        package="rouge_score",
        recipe=_from_hub("abisee/cnn_dailymail", "test", "cnn_test.jsonl", config="3.0.0"),
    ),
)
TEXT_TASKS: dict[str, TextTaskKind] = {kind.name: kind for kind in _KINDS}
