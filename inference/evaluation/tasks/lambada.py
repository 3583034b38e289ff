"""LAMBADA: predict the last word of a passage (Paperno et al., ACL 2016).

The metrics differ by ten points and more, so each has its own name:

* `lambada_last_token`, as FasterTransformer's guides count: the passage is encoded whole, all
  tokens but the last are the context, and one greedy token must equal the last. A word of three
  tokens has its first two given.
* `lambada_last_word`: the passage without its last word is the context, and its greedy
  continuation must start with exactly the tokens of " " + word.
* `lambada_perplexity`: exp of the mean negative log probability of the last word, all its tokens
  together, given that context.
* `lambada_token_perplexity`: exp of the mean negative log probability of every token of the passage
  after its first. It is the sharpest of all against a baseline: a passage has a hundred tokens.

The word begins after the last space. Context and " " + word are encoded apart; with byte-level
BPE that equals encoding the passage whole, since a piece starts at each such space.

Through which model: the last word is asked as text through the ensemble, with the output length
of the word in tokens. An answer of other text has other tokens, so it is wrong and nothing more
is asked. An answer of the same text might be spelt with other tokens; its tokens are then asked
for as ids, and these decide. So text never has to be cut or stripped at a word boundary. The
last token needs ids (its context may end inside a word) and asks the model itself; after a word of
one token that is the question just answered. The word's log probability is that of the whole
passage less that of its context.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from foundations.files.checksum import sha256_of
from inference.evaluation.options import LAMBADA_METRICS, EvaluationOptions
from inference.evaluation.statistics import (
    LEAST_LOG_PROB,
    Z_95,
    mean_and_stderr,
    mean_metric,
)
from inference.evaluation.task import (
    LOG_PROBS,
    TOKEN_IDS,
    Drawn,
    Metric,
    Metrics,
    Prediction,
    Sample,
    Score,
    Task,
    TextGenerator,
    added_text,
)
from inference.evaluation.tasks.datasets import (
    drawn_from_file,
    missing_files,
    read_rows,
)

LAST_WORD, LAST_TOKEN, PERPLEXITY, TOKEN_PERPLEXITY = LAMBADA_METRICS
# Per sample: the parts of the perplexities.
WORD_LOG_PROB = "lambada_word_log_prob"
LOG_PROB, TOKENS = "lambada_log_prob", "lambada_tokens"
# OpenAI's preprocessing of the LAMBADA test set (CC BY 4.0): 5,153 lines {"text": ...}.
_DATA = "lambada_test.jsonl"
_URL = f"https://openaipublic.blob.core.windows.net/gpt-2/data/{_DATA}"
_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"

_METHODS = {
    LAST_WORD: "the greedy continuation starts with exactly the tokens of the last word",
    LAST_TOKEN: "one greedy token after all other tokens of the passage equals its last",
    PERPLEXITY: "exp of the mean negative log probability of the last word",
    TOKEN_PERPLEXITY: "exp of the mean negative log probability of a token of the passage",
}
_BY_TEXT = "the greedy continuation, as long as the last word in tokens, reads as that word"
_NEEDS = {LAST_TOKEN: TOKEN_IDS, PERPLEXITY: LOG_PROBS, TOKEN_PERPLEXITY: LOG_PROBS}
# The short names evaluation harnesses use for the same quantities.
_KEYS = {
    LAST_WORD: "acc",
    LAST_TOKEN: "last_token_acc",
    PERPLEXITY: "ppl",
    TOKEN_PERPLEXITY: "token_ppl",
}
# For each perplexity: the summed log probability of a sample, and the tokens it counts for.
_PARTS = {PERPLEXITY: (WORD_LOG_PROB, ""), TOKEN_PERPLEXITY: (LOG_PROB, TOKENS)}


def split_last_word(text: str) -> tuple[str, str]:
    """Return a passage without its last word, and that word; they are one space apart.

    Raises:
        ValueError: there is no space, so nothing remains to predict the word from; or white space
            follows the word, which no answer could equal.
    """
    context, space, word = text.rpartition(" ")
    if not space or not context.strip() or not word or word != word.rstrip():
        raise ValueError(
            f"passage {text[-80:]!r} needs a last word after a space, with text before it and no "
            "white space behind it"
        )
    return context, word


class Lambada(Task):
    """The task `lambada`; stateless, so threads may share it."""

    name = "lambada"
    needs = _NEEDS

    def __init__(self, options: EvaluationOptions) -> None:
        super().__init__(options)
        self.metric_names = tuple(
            name for name in options.lambada.metrics if _NEEDS.get(name) not in options.lacks
        )

    def problems(self) -> list[str]:
        """Return unknown metrics, and files that do not exist."""
        lambada, known = self.options.lambada, ", ".join(LAMBADA_METRICS)
        problems = [
            f"unknown metric {name!r} in evaluate.lambada.metrics; known: {known}."
            for name in lambada.metrics
            if name not in LAMBADA_METRICS
        ]
        if not lambada.metrics:
            problems.append(f"evaluate.lambada.metrics is empty; choose from {known}.")
        return [*problems, *missing_files("lambada", lambada, "data_path")]

    @property
    def _path(self) -> Path:
        return Path(self.options.lambada.data_path or self.options.data_dir / _DATA)

    def data_problem(self) -> str:
        """Return where the passages have to be, if they are not, and where they come from."""
        if self._path.is_file():
            return ""
        return (
            f"the passages of LAMBADA are not at {self._path}; get them (SHA-256 {_SHA256}) by "
            f"curl -o {self._path} {_URL}, or set evaluate.lambada.data_path to where they are."
        )

    def prepare(self) -> Drawn:
        """Read the passages.

        Raises:
            ValueError: the file is missing, in the place of the test set and not it, or a passage
                has no last word.
        """
        if problem := self.data_problem():
            raise ValueError(problem)
        path, samples = self._path, []
        if self.options.lambada.data_path is None and (found := sha256_of(path)) != _SHA256:
            raise ValueError(
                f"{path} has SHA-256 {found}, expected {_SHA256}; set evaluate.lambada.data_path "
                "to use passages of your own."
            )
        for index, row in enumerate(read_rows(path, "text")):
            try:
                context, word = split_last_word(row["text"])
            except ValueError as error:
                raise ValueError(f"{path}, row {index + 1}: {error}") from error
            samples.append(Sample(index=index, text=context, target=word))
        return drawn_from_file(samples, self.options, path)

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Measure the configured metrics on one passage."""
        wanted = self.metric_names
        values: dict[str, float] = {}
        answer = ""
        context_ids = model.encode(sample.text)
        word_ids = model.encode(" " + sample.target)
        if LAST_WORD in wanted:
            answer = model.complete_text(sample.text, output_len=len(word_ids)).text
            expected = added_text(model.decode, context_ids, word_ids)
            right = answer == expected
            if self._by_text:  # some servers leave out the space before an answer
                right = answer.strip() == expected.strip()
            elif right:  # the same text may be spelt with other tokens
                right = model.complete_ids(context_ids, output_len=len(word_ids)) == word_ids
            values[LAST_WORD] = float(right)
        if LAST_TOKEN in wanted:
            ids = model.encode(f"{sample.text} {sample.target}")
            if LAST_WORD in values and ids[:-1] == context_ids and ids[-1:] == word_ids:
                values[LAST_TOKEN] = values[LAST_WORD]
            else:
                predicted = model.complete_ids(ids[:-1], output_len=1)
                values[LAST_TOKEN] = float(predicted == ids[-1:])
                answer = answer or model.decode(predicted)
        if PERPLEXITY in wanted or TOKEN_PERPLEXITY in wanted:
            ids = context_ids + word_ids
            values[LOG_PROB], values[TOKENS] = model.context_log_prob(ids), float(len(ids) - 1)
        if PERPLEXITY in wanted:
            values[WORD_LOG_PROB] = values[LOG_PROB] - model.context_log_prob(context_ids)
        return Score(values=values, answer=answer)

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the configured metrics over all passages, in the order of LAMBADA_METRICS."""
        methods = _METHODS | ({LAST_WORD: _BY_TEXT} if self._by_text else {})
        return tuple(
            _perplexity(name, found)
            if name in _PARTS
            else mean_metric(name, found, key=_KEYS[name], method=methods[name])
            for name in LAMBADA_METRICS
            if name in self.metric_names
        )

    @property
    def _by_text(self) -> bool:
        """The text alone decides on the last word of a model whose token ids are unknown."""
        return TOKEN_IDS in self.options.lacks


def _perplexity(name: str, found: Sequence[Prediction]) -> Metric:
    """Return a perplexity; its interval is that of the mean log probability, transformed."""
    log_prob, tokens = _PARTS[name]
    weights = [each.values[tokens] for each in found] if tokens else None
    mean, stderr = mean_and_stderr([each.values[log_prob] for each in found], weights)
    mean = max(mean, LEAST_LOG_PROB)
    stderr = min(stderr, -LEAST_LOG_PROB)
    value = math.exp(-mean)
    return Metric(
        name=name,
        key=_KEYS[name],
        value=value,
        stderr=value * stderr,  # first order: d exp(-m) = -exp(-m) dm
        low=math.exp(-mean - Z_95 * stderr),
        high=math.exp(-mean + Z_95 * stderr),
        count=len(found),
        unit="perplexity",
        higher_is_better=False,
        method=_METHODS[name],
        sample_value=log_prob,
        scale="exp",
        weight=tokens,
    )
