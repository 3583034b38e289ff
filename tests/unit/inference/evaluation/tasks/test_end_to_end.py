"""The smoke test of the ensemble: what it finds right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions
from inference.evaluation.task import Completion, Sample
from inference.evaluation.tasks.end_to_end import PROMPTS, EndToEnd

SAMPLE = Sample(0, "He said", "")


@pytest.fixture
def model(fake_model):
    """Return a model that says "yes no"; with a banned word it says something else."""
    return fake_model({"He said": (" ye", "s", " no")})


def task(**changes) -> EndToEnd:
    return EndToEnd(EvaluationOptions(data_dir=Path(), **changes))


def values(model) -> tuple[float, ...]:
    return tuple(task().score(SAMPLE, model).values.values())


def test_a_sound_ensemble_passes(model):
    assert values(model) == (1.0, 1.0, 1.0)


def test_an_ensemble_that_differs_from_its_parts_is_found(model):
    steps = model.complete_in_steps
    model.complete_in_steps = lambda prompt, **options: (
        steps(prompt, **options)[0],
        Completion("another text"),
    )
    assert values(model) == (0.0, 1.0, 1.0)


def test_an_ensemble_without_word_lists_is_found(model):
    complete = model.complete_text
    model.complete_text = lambda prompt, *, output_len, **_: complete(prompt, output_len=output_len)
    assert values(model) == (1.0, 0.0, 0.0)


def test_the_whole_task_has_a_metric_for_each_statement():
    dataset, samples = task().prepare()
    assert dataset.total == len(samples) == len(PROMPTS) == 8
    dataset, samples = task(limit=3).prepare()
    assert (dataset.count, dataset.limit, len(samples)) == (3, 3, 3)
