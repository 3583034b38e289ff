"""BoolQ, MNLI, XNLI, SQuAD, translation and summarisation: a row of TEXT_TASKS each.

BLEU is sacrebleu's and ROUGE is rouge-score's; both are imported when first used. Exact match and
F1 follow SQuAD's definition (Rajpurkar et al., EMNLP 2016): lower case, without punctuation and
articles, the best of several right answers.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from inference.evaluation.statistics import Z_95
from inference.evaluation.task import Metric, Sample, Score
from inference.evaluation.tasks.datasets import (
    DataSource,
    Row,
    labelled_rows,
    read_rows,
    squad_rows,
    translation_rows,
)
from inference.evaluation.tasks.text_task import Measure, TextTaskKind

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ROUGE_METHOD = "mean F-measure of rouge-score, of the first four sentences"
_RESAMPLES = 300  # of the bootstrap behind the interval of BLEU


def equal(answer: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the answer is one of the targets, blanks around it aside."""
    return float(answer.strip() in {target.strip() for target in targets})


def _normalised(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the normalised answer is one of the normalised targets."""
    return float(any(_normalised(answer) == _normalised(target) for target in targets))


def token_f1(answer: str, targets: Sequence[str]) -> float:
    """Return the best F1 of the words that answer and target share, 0 to 1."""
    return max(_f1(Counter(_normalised(answer)), Counter(_normalised(t))) for t in targets)


def _f1(answer: Counter[str], target: Counter[str]) -> float:
    if not answer or not target:
        return float(answer == target)
    return 2 * (answer & target).total() / (answer.total() + target.total())


def rouge(kind: str, answer: str, targets: Sequence[str]) -> float:
    """Return an F-measure of ROUGE, 0 to 1, of the first four sentences, without stemming."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=False)
    first_sentences = ".".join(answer.split(".")[:4])  # only a full stop ends one
    return float(scorer.score(targets[0], first_sentences)[kind].fmeasure)


def sentence_bleu(answer: str, targets: Sequence[str]) -> float:
    """Return sacrebleu's score of one sentence, 0 to 100."""
    import sacrebleu

    return float(sacrebleu.sentence_bleu(answer, [targets[0]]).score)


def corpus_bleu(samples: Sequence[Sample], scores: Sequence[Score]) -> Metric:
    """Return sacrebleu's corpus score.

    The interval is sacrebleu's own, by bootstrap resampling (Koehn, EMNLP 2004).
    """
    from sacrebleu.metrics.bleu import BLEU

    found: Any = BLEU(force=True).corpus_score(
        [score.answer for score in scores],
        [[sample.target for sample in samples]],
        n_bootstrap=_RESAMPLES if len(scores) > 1 else 1,
    )
    value, half = float(found.score), max(0.0, float(getattr(found, "_ci", 0.0)))
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
_TRUTH = {"0": "false", "1": "true"}
_INFERENCE = {"0": "entailment", "1": "neutral", "2": "contradiction"}
_ACCURACY = Measure("accuracy", "acc", "share of answers that equal the right one", equal)


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
        lambda path, _: labelled_rows(path, "passage", "question", labels=_TRUTH),
        (_ACCURACY,),
        template="{passage}{question}",
        output_len=10,
        choices={"true": " yes", "false": " no"},
        likelihood_template="{passage}\nQuestion: {question}\nAnswer:",
        source=_BOOLQ,
    ),
    TextTaskKind(
        "mnli",
        lambda path, _: labelled_rows(path, "premise", "hypothesis", labels=_INFERENCE),
        (_ACCURACY,),
        template="mnli hypothesis: {hypothesis} premise: {premise}",
        output_len=10,
        grouped=True,
        recipe=_from_hub("nyu-mll/multi_nli", "validation_matched", "mnli.jsonl"),
    ),
    TextTaskKind(
        "xnli",
        lambda path, _: labelled_rows(path, "premise", "hypothesis", labels=_INFERENCE),
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
        lambda path, own: translation_rows(path, own.target_path),
        (Measure("sentence_bleu", "", "", sentence_bleu),),
        corpus={"translation_bleu": corpus_bleu},
        template="translate English to German: {source}",
        output_len=128,
        package="sacrebleu",
        recipe="sacrebleu -t wmt14 -l en-de --echo src > en.txt, and with --echo ref > de.txt for "
        "evaluate.translation.target_path",
    ),
    TextTaskKind(
        "summarization",
        lambda path, _: [
            Row({"article": row["article"].strip().replace(" n't", "n't")}, (row["highlights"],))
            for row in read_rows(path, "article", "highlights")
        ],
        tuple(
            Measure(kind, kind, _ROUGE_METHOD, partial(rouge, kind), is_share=False)
            for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum")
        ),
        template="summarize: {article}",
        output_len=200,
        package="rouge_score",
        recipe=_from_hub("abisee/cnn_dailymail", "test", "cnn_test.jsonl", config="3.0.0"),
    ),
)
TEXT_TASKS: dict[str, TextTaskKind] = {kind.name: kind for kind in _KINDS}
