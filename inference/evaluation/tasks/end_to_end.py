"""Text in, text out: a smoke test of the ensemble and of its word lists.

For each prompt the ensemble's text must equal what preprocessing, the model and postprocessing give
one after the other; an answer must stop at a stop word that it contains; and it must do without a
word that is banned.
"""

import csv
import hashlib
import io
from collections.abc import Sequence
from functools import partial

from inference.evaluation.statistics import mean_metric
from inference.evaluation.task import (
    TENSORS,
    Drawn,
    Ids,
    Metrics,
    Prediction,
    Sample,
    Score,
    Task,
    TextGenerator,
)
from inference.evaluation.tasks.datasets import drawn

PROMPTS = (
    "The old lighthouse stood at the end of the point, and every evening",
    "She opened the letter with trembling hands and read",
    "It was raining when they came to the village, and",
    "The captain looked at the sky and said that",
    "Nobody had lived in the house for twenty years, but",
    "He put the money on the table and",
    "In the morning the snow had gone, and the road",
    "The two brothers had not spoken since the day",
)
OUTPUT_LEN = 24
AGREEMENT = "end_to_end_agreement"
STOP_WORDS = "end_to_end_stop_words"
BAD_WORDS = "end_to_end_bad_words"
_METHODS = {
    AGREEMENT: "the ensemble's text equals that of its three models one after the other",
    STOP_WORDS: "the answer ends at a stop word that it contains",
    BAD_WORDS: "the answer does without a word that is banned",
}


class EndToEnd(Task):
    """The task `end_to_end`; its prompts are its own."""

    name = "end_to_end"
    only_served = True
    metric_names = tuple(_METHODS)
    needs = dict.fromkeys(_METHODS, TENSORS)

    def problems(self) -> list[str]:
        """Return that there is no ensemble to ask."""
        if self.options.ensemble_name is not None:
            return []
        return [
            "evaluate.tasks has end_to_end, which asks the ensemble; the repository has none "
            "(export.triton_deployment.ensemble=false)."
        ]

    def prepare(self) -> Drawn:
        """Return the prompts."""
        samples = [Sample(index, text, target="") for index, text in enumerate(PROMPTS)]
        return drawn(
            samples,
            self.options,
            name="bundled prompts",
            path="inference/evaluation/tasks/end_to_end.py",
            sha256=hashlib.sha256("\n".join(PROMPTS).encode()).hexdigest(),
        )

    def score(self, sample: Sample, model: TextGenerator) -> Score:
        """Ask for one prompt plainly, in steps, with a stop word and with a banned word."""
        whole = model.complete_text(sample.text, output_len=OUTPUT_LEN)
        answer, in_steps = model.complete_in_steps(sample.text, output_len=OUTPUT_LEN)
        values = {AGREEMENT: float(whole.text == in_steps.text), STOP_WORDS: 1.0, BAD_WORDS: 1.0}
        word = _word_in(answer, model)
        if word is not None:  # else nothing in the answer can be written as a word
            length, token, text = word
            record = io.StringIO()  # of CSV, in which word lists are written
            csv.writer(record, lineterminator="").writerow([text])
            ask = partial(model.complete_text, sample.text, output_len=OUTPUT_LEN)
            stopped, banned = ask(stop=record.getvalue()).text, ask(bad=record.getvalue()).text
            shorter = model.complete_text(sample.text, output_len=length)
            values[STOP_WORDS] = float(stopped == shorter.text)
            values[BAD_WORDS] = float(token not in model.encode(banned))
        return Score(values=values, answer=whole.text)

    def metrics(self, found: Sequence[Prediction]) -> Metrics:
        """Return the share of prompts for which each statement holds."""
        return tuple(
            mean_metric(name, found, key=name.removeprefix(f"{self.name}_"), method=method)
            for name, method in _METHODS.items()
        )


def _word_in(answer: Ids, model: TextGenerator) -> tuple[int, int, str] | None:
    """Return the first token that is written as it is read: tokens up to it, its id, its text."""
    for length, token in enumerate(answer, start=1):
        text = model.decode([token])
        if text.strip() and model.encode(text) == (token,):
            return length, token, text
    return None
