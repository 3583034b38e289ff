"""BoolQ, MNLI, XNLI, SQuAD, translation and summarisation: a row of TEXT_TASKS each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inference.evaluation.options import TextTaskOptions
from inference.evaluation.statistics import Z_95
from inference.evaluation.task import Metric, Sample, Score
from inference.evaluation.tasks.datasets import DataSource
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
from inference.evaluation.tasks.text_task import Measure, TextTaskKind

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


_ACCURACY = Measure("accuracy", "acc", "share of answers that equal the right one", equal)


def _rouge(kind: str) -> Measure:
    def score(answer: str, targets: Sequence[str]) -> float:
        return rouge(first_sentences(answer), targets[0], kinds=(kind,))[kind]

    method = "mean F-measure of rouge-score, of the first four sentences"
    return Measure(kind, kind, method, score, is_share=False)


def _bleu(samples: Sequence[Sample], scores: Sequence[Score]) -> Metric:
    value, half = corpus_bleu(
        [score.answer for score in scores], [sample.target for sample in samples]
    )
    return Metric(
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


def _translation_rows(path: Path, options: TextTaskOptions) -> list[Row]:
    return translation_rows(
        path, None if options.target_path is None else Path(options.target_path)
    )


def _from_hub(name: str, split: str, file: str, *, config: str = "") -> str:
    """Return the line that makes the file of a data set on the Hugging Face hub."""
    arguments = ", ".join(f'"{each}"' for each in (name, config) if each)
    return (
        f"python -c 'import datasets; datasets.load_dataset({arguments}, "
        f'split="{split}").to_json("{file}")\''
    )


_KINDS = (
    TextTaskKind(
        "boolq",
        lambda path, _: boolq_rows(path),
        (_ACCURACY,),
        template="{passage}{question}",
        output_len=10,
        choices={"true": " yes", "false": " no"},
        likelihood_template="{passage}\nQuestion: {question}\nAnswer:",
        source=_BOOLQ,
    ),
    TextTaskKind(
        "mnli",
        lambda path, _: nli_rows(path),
        (_ACCURACY,),
        template="mnli hypothesis: {hypothesis} premise: {premise}",
        output_len=10,
        grouped=True,
        recipe=_from_hub("nyu-mll/multi_nli", "validation_matched", "mnli.jsonl"),
    ),
    TextTaskKind(
        "xnli",
        lambda path, _: nli_rows(path),
        (_ACCURACY,),
        template="xnli: premise: {premise} hypothesis: {hypothesis}",
        output_len=10,
        grouped=True,
        recipe=_from_hub("facebook/xnli", "test", "xnli.jsonl", config="de")
        + ' (of other languages, "de" is their code; rows may name theirs in a field language)',
    ),
    TextTaskKind(
        "squad",
        lambda path, _: squad_rows(path),
        (
            Measure(
                "exact_match",
                "em",
                "share of answers equal to a right one without case, punctuation and articles",
                exact_match,
            ),
            Measure(
                "f1",
                "f1",
                "mean F1 of the words that answer and best right answer share",
                token_f1,
                is_share=False,
            ),
        ),
        template="question: {question} context: {context}",
        output_len=32,
        source=DataSource(_SQUAD_URL, _SQUAD_SHA256),
    ),
    TextTaskKind(
        "translation",
        _translation_rows,
        (Measure("sentence_bleu", "", "", lambda a, targets: sentence_bleu(a, targets[0])),),
        corpus={"translation_bleu": _bleu},
        template="translate English to German: {source}",
        output_len=128,
        package="sacrebleu",
        recipe="sacrebleu -t wmt14 -l en-de --echo src > en.txt, and with --echo ref > de.txt for "
        "evaluate.translation.target_path",
    ),
    TextTaskKind(
        "summarization",
        lambda path, _: summarization_rows(path),
        tuple(map(_rouge, ROUGE_TYPES)),
        template="summarize: {article}",
        output_len=200,
        package="rouge_score",
        recipe=_from_hub("abisee/cnn_dailymail", "test", "cnn_test.jsonl", config="3.0.0"),
    ),
)
TEXT_TASKS: dict[str, TextTaskKind] = {kind.name: kind for kind in _KINDS}
