"""Scores of text answers: exact match, token overlap, BLEU, ROUGE.

BLEU is sacrebleu's and ROUGE is rouge-score's; both are imported when first used. Exact match and
F1 follow SQuAD's definition (Rajpurkar et al., EMNLP 2016): lower case, without punctuation and
articles, the best of several right answers.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
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
    return max(_f1(_normalised(answer), _normalised(target)) for target in targets)


def _f1(answer: Sequence[str], target: Sequence[str]) -> float:
    if not answer or not target:
        return float(answer == target)
    shared = sum((Counter(answer) & Counter(target)).values())
    return 2 * shared / (len(answer) + len(target))


def rouge(answer: str, target: str, *, kinds: Sequence[str] = ROUGE_TYPES) -> dict[str, float]:
    """Return the F-measures of ROUGE, 0 to 1, without stemming."""
    from rouge_score import rouge_scorer  # type: ignore[import-untyped]

    scores = rouge_scorer.RougeScorer(list(kinds), use_stemmer=False).score(target, answer)
    return {kind: float(scores[kind].fmeasure) for kind in kinds}


def first_sentences(text: str) -> str:
    """Return the first four sentences; only a full stop ends one."""
    return ".".join(text.split(".")[:4]).strip(". ") + "."


def sentence_bleu(answer: str, target: str) -> float:
    """Return sacrebleu's score of one sentence, 0 to 100."""
    import sacrebleu

    return float(sacrebleu.sentence_bleu(answer, [target]).score)


def corpus_bleu(answers: Sequence[str], targets: Sequence[str]) -> tuple[float, float]:
    """Return sacrebleu's corpus score, 0 to 100, and half the width of its 95% interval.

    The interval is sacrebleu's own, by bootstrap resampling (Koehn, EMNLP 2004).
    """
    from sacrebleu.metrics.bleu import BLEU

    found: Any = BLEU(force=True).corpus_score(
        list(answers), [list(targets)], n_bootstrap=_RESAMPLES if len(answers) > 1 else 1
    )
    return float(found.score), max(0.0, float(getattr(found, "_ci", 0.0)))
