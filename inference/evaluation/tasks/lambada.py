"""LAMBADA: predict the last word of a passage (Paperno et al., ACL 2016).

The metrics differ by ten points and more, so each has its own name:

* `lambada_last_token`, as in FasterTransformer's guides: the passage is encoded as a whole, all
  tokens but the last are the context, and one greedy token must equal the last. The context
  includes the first two tokens of a word of three.
* `lambada_last_word`: the passage without its last word is the context, and its greedy
  continuation must start with exactly the tokens of " " + word.
* `lambada_perplexity`: exp of the mean negative log probability of the last word, over all its
  tokens, given that context.
* `lambada_token_perplexity`: exp of the mean negative log probability of every token of the passage
  after its first. It is the most sensitive to changes, because a passage has a hundred tokens.

The word begins after the last space. Context and " " + word are encoded separately; with byte-level
BPE this equals encoding the whole passage, because a token starts at each such space.

The last word is requested as text from the ensemble, with the word's number of tokens. An answer of
other text has other tokens and is wrong. An answer of the same text may have other tokens, so its
token ids are requested and decide; text is never cut or stripped at a word boundary. The last token
is requested from the model by ids, because its context may end inside a word; for a word of one
token, the answer is the same. The log probability of the word is that of the whole passage less
that of its context.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from foundations.files.checksum import sha256_of
from inference.evaluation.options import LAMBADA_METRICS, EvaluationOptions
from inference.evaluation.statistics import LEAST_LOG_PROB, Z_95, mean_and_stderr, mean_metric
from inference.evaluation.task import (
    LOG_PROBS,
    TOKEN_IDS,
    DatasetSamples,
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
    choose_from_file,
    missing_files,
    read_rows,
)

LAST_WORD, LAST_TOKEN, PERPLEXITY, TOKEN_PERPLEXITY = LAMBADA_METRICS
# Per-sample quantities of the perplexities.
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
# Short names of the same quantities in evaluation harnesses.
_KEYS = {
    LAST_WORD: "acc",
    LAST_TOKEN: "last_token_acc",
    PERPLEXITY: "ppl",
    TOKEN_PERPLEXITY: "token_ppl",
}
# Perplexity -> quantity with a sample's summed log probability, and with its number of tokens.
_PARTS = {PERPLEXITY: (WORD_LOG_PROB, ""), TOKEN_PERPLEXITY: (LOG_PROB, TOKENS)}


def split_last_word(text: str) -> tuple[str, str]:
    """Split a passage at its last space into the context and the last word.

    Raises:
        ValueError: there is no context, or white space follows the word, so that no answer could
            equal it.
    """
    context, space, word = text.rpartition(" ")
    if not space or not context.strip() or not word or word != word.rstrip():
        raise ValueError(
            f"passage {text[-80:]!r} needs a last word after a space, with text before it and no "
            "white space after it"
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

    def problems(self) -> Iterator[str]:
        """Yield unknown metrics, and files that do not exist."""
        lambada, known = self.options.lambada, ", ".join(LAMBADA_METRICS)
        yield from (
            f"unknown metric {name!r} in evaluate.lambada.metrics; known: {known}."
            for name in lambada.metrics
            if name not in LAMBADA_METRICS
        )
        if not lambada.metrics:
            yield f"evaluate.lambada.metrics is empty; choose from {known}."
        yield from missing_files("lambada", lambada, "data_path")

    @property
    def _path(self) -> Path:
        return self.options.lambada.data_path or self.options.data_dir / _DATA

    def data_problem(self) -> str:
        """Return the expected path of the passages and their source; empty if they exist."""
        if self._path.is_file():
            return ""
        return (
            f"the passages of LAMBADA are not at {self._path}; download them (SHA-256 {_SHA256}) "
            f"with curl -o {self._path} {_URL}, or set evaluate.lambada.data_path to their path."
        )

    def prepare(self) -> DatasetSamples:
        """Read the passages.

        Raises:
            ValueError: the file is missing, differs from the test set at its default path, or has a
                passage without a last word.
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
        return choose_from_file(samples, self.options, path)

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Score the configured metrics on one passage."""
        wanted = self.metric_names
        values = {}
        answer = ""
        context_ids = model.encode(sample.text)
        word_ids = model.encode(" " + sample.target)
        if LAST_WORD in wanted:
            answer = model.complete_text(sample.text, output_len=len(word_ids)).text
            expected = added_text(model.decode, context_ids, word_ids)
            is_correct = answer == expected
            if self._by_text:  # some servers omit the space before an answer
                is_correct = answer.strip() == expected.strip()
            elif is_correct:  # the same text may have other tokens
                is_correct = model.complete_ids(context_ids, output_len=len(word_ids)) == word_ids
            values[LAST_WORD] = float(is_correct)
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
        """Whether text alone decides about the last word, because the server gives no token ids."""
        return TOKEN_IDS in self.options.lacks


def _perplexity(name: str, found: Sequence[Prediction]) -> Metric:
    """Return a perplexity; its interval is the exponential of the mean log probability's."""
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
