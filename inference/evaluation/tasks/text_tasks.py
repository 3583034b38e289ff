"""Scores and data formats of text_tasks.yaml.

BLEU is sacrebleu's and ROUGE is rouge-score's; both are imported on first use. Exact match and F1
follow SQuAD's definition (Rajpurkar et al., EMNLP 2016): lower case, without punctuation and
articles, and the best of several correct answers.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from foundations.files.json_content import Table
from inference.evaluation.options import TextTaskOptions
from inference.evaluation.statistics import Z_95
from inference.evaluation.task import Metric, Prediction
from inference.evaluation.tasks.datasets import (
    Row,
    labelled_rows,
    read_rows,
    squad_rows,
    translation_rows,
)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RESAMPLES = 300  # of the bootstrap for BLEU's interval


def equal(answer: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the answer, without surrounding white space, is one of the targets."""
    return float(answer.strip() in {target.strip() for target in targets})


def _normalised(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, targets: Sequence[str]) -> float:
    """Return 1.0 if the normalised answer is one of the normalised targets."""
    return float(any(_normalised(answer) == _normalised(target) for target in targets))


def token_f1(answer: str, targets: Sequence[str]) -> float:
    """Return the best F1 of the words that the answer shares with a target, 0 to 1."""
    return max(_f1(Counter(_normalised(answer)), Counter(_normalised(t))) for t in targets)


def _f1(answer: Counter[str], target: Counter[str]) -> float:
    if not answer or not target:
        return float(answer == target)
    return 2 * (answer & target).total() / (answer.total() + target.total())


def rouge(kind: str, answer: str, targets: Sequence[str]) -> float:
    """Return ROUGE's F-measure of the first four sentences, 0 to 1, without stemming."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer([kind], use_stemmer=False)
    first_sentences = ".".join(answer.split(".")[:4])  # a sentence ends at a full stop
    return float(scorer.score(targets[0], first_sentences)[kind].fmeasure)


def sentence_bleu(answer: str, targets: Sequence[str]) -> float:
    """Return sacrebleu's score of one sentence, 0 to 100."""
    import sacrebleu

    return float(sacrebleu.sentence_bleu(answer, [targets[0]]).score)


def corpus_bleu(predictions: Sequence[Prediction]) -> Metric:
    """Return sacrebleu's corpus score.

    The interval is sacrebleu's own, by bootstrap resampling (Koehn, EMNLP 2004).
    """
    from sacrebleu.metrics.bleu import BLEU

    found = BLEU(force=True).corpus_score(
        [each.answer for each in predictions],
        [[each.target for each in predictions]],
        n_bootstrap=_RESAMPLES if len(predictions) > 1 else 1,
    )
    value, half = float(found.score), max(0.0, float(getattr(found, "_ci", 0.0)))
    return Metric(
        name="translation_bleu",
        key="bleu",
        value=value,
        stderr=half / Z_95,
        low=max(0.0, value - half),
        high=min(100.0, value + half),
        count=len(predictions),
        unit="BLEU",
        method="sacrebleu's corpus score, 0 to 100",
        sample_value="translation_sentence_bleu",
    )


# Names in text_tasks.yaml -> score of an answer, or metric over all answers.
SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "equal": equal,
    "exact_match": exact_match,
    "token_f1": token_f1,
    "sentence_bleu": sentence_bleu,
    **{name: partial(rouge, name) for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")},
}
CORPUS: Mapping[str, Callable[[Sequence[Prediction]], Metric]] = {"translation_bleu": corpus_bleu}


def _articles(path: Path) -> list[Row]:
    """Read rows of a summarisation data set, and join tokenised negations."""
    rows = read_rows(path, "article", "highlights")
    return [
        Row({"article": row["article"].strip().replace(" n't", "n't")}, (row["highlights"],))
        for row in rows
    ]


# Data format -> function that reads it, from the path, the task's options and its key `rows`.
FORMS: Mapping[str, Callable[[Path, TextTaskOptions, Table], list[Row]]] = {
    "labels": lambda path, _, rows: labelled_rows(path, *rows["texts"], labels=rows["labels"]),
    "squad": lambda path, *_: squad_rows(path),
    "lines": lambda path, options, _: translation_rows(path, options.target_path),
    "articles": lambda path, *_: _articles(path),
}
