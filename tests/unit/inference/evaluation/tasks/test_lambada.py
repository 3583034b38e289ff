"""The three LAMBADA metrics, each by its definition."""

import json
import math
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LambadaOptions
from inference.evaluation.run.baseline import read_baseline
from inference.evaluation.task import Prediction, Sample, Values
from inference.evaluation.tasks.lambada import Lambada, split_last_word
from tests.conftest import ROOT


def task(data_path: Path | None = None, **changes) -> Lambada:
    names = LambadaOptions.__dataclass_fields__.keys() & changes.keys()
    own = LambadaOptions(data_path, **{name: changes.pop(name) for name in names})
    return Lambada(EvaluationOptions(data_dir=Path(), lambada=own, **changes))


SAMPLE = Sample(index=0, text="The cook lit the", target="lamp")


def test_the_last_word_begins_after_the_last_space():
    assert split_last_word("one two\n\nthree four") == ("one two\n\nthree", "four")
    assert split_last_word("it is kind of\n\nPower") == ("it is kind", "of\n\nPower")


@pytest.mark.parametrize("text", ["lonely", "ends with a space ", "ends with a line\n", " word"])
def test_a_passage_without_context_or_last_word_is_refused(text):
    with pytest.raises(ValueError, match="needs a last word after a space"):
        split_last_word(text)


def test_the_row_of_a_passage_without_context_is_named(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text('{"text": "two words"}\n\n{"text": "one"}\n')
    with pytest.raises(ValueError, match=r"passages\.jsonl, row 2: passage 'one' needs"):
        task(path).prepare()


@pytest.mark.parametrize(
    ("tokens", "right"),
    [
        ((" la", "mp"), 1.0),
        ((" la", "nd"), 0.0),
        ((" l", "amp"), 0.0),  # spelled by other tokens
        ((" la", "mp", "light"), 1.0),
    ],
)
def test_last_word_is_right_when_every_token_is(fake_model, tokens, right):
    model = fake_model({"The cook lit the": tokens})
    score = task(metrics=("lambada_last_word",)).score(SAMPLE, model)
    assert score.values == {"lambada_last_word": right}
    assert score.answer == "".join(tokens[:2])


def test_last_token_is_given_the_word_s_other_tokens(fake_model):
    model = fake_model({"The cook lit the la": ("mp",)})
    score = task(metrics=("lambada_last_token",)).score(SAMPLE, model)
    assert score.values == {"lambada_last_token": 1.0}
    assert model.requests == ["The cook lit the la"]


@pytest.mark.parametrize(("answer", "right"), [(" me", 1.0), (" we", 0.0)])
def test_a_word_of_one_token_is_asked_for_once(fake_model, answer, right):
    model = fake_model({"They asked": (answer,)})
    sample = Sample(index=0, text="They asked", target="me")
    score = task(metrics=("lambada_last_word", "lambada_last_token")).score(sample, model)
    assert score.values == {"lambada_last_word": right, "lambada_last_token": right}
    assert set(model.requests) == {"They asked"}
    assert len(model.requests) == 1 + int(right)  # a right answer's spelling is looked at


def test_word_log_probability_leaves_the_context_out(fake_model):
    score = task(metrics=("lambada_perplexity",)).score(SAMPLE, fake_model())
    assert score.values == {
        "lambada_word_log_prob": pytest.approx(-1.0),  # two tokens of -0.5
        "lambada_log_prob": pytest.approx(-4.0),
        "lambada_tokens": 8.0,
    }


def test_a_word_is_scored_by_its_passage_and_its_context(fake_model):
    model = fake_model()
    both = task(metrics=("lambada_last_word", "lambada_perplexity")).score(SAMPLE, model)
    assert both.values["lambada_word_log_prob"] == pytest.approx(-1.0)
    assert model.requests == ["The cook lit the", "The cook lit the lamp", "The cook lit the"]


def scored(values: Values) -> Prediction:
    return Prediction("lambada", 0, "", "", "", values, seconds=0.0)


def test_perplexity_is_over_words_not_tokens():
    found = [scored({"lambada_word_log_prob": value}) for value in (-1.0, -3.0)]
    (metric,) = task(metrics=("lambada_perplexity",)).metrics(found)
    assert metric.value == pytest.approx(math.exp(2.0))
    assert metric.stderr == pytest.approx(math.exp(2.0) * 1.0)
    assert metric.low < metric.value < metric.high
    assert not metric.higher_is_better


def test_perplexity_of_a_broken_model_is_a_number():
    found = [scored({"lambada_word_log_prob": value}) for value in (-1e30, -2.0)]
    (metric,) = task(metrics=("lambada_perplexity",)).metrics(found)
    assert 0 < metric.low < 1e80 < metric.value < metric.high < math.inf


def test_accuracy_counts_all_samples():
    found = [scored({"lambada_last_word": value}) for value in (1.0, 0.0, 0.0, 0.0)]
    (metric,) = task(metrics=("lambada_last_word",)).metrics(found)
    assert (metric.value, metric.count, metric.key) == (0.25, 4, "acc")
    assert 0.0 < metric.low < 0.25 < metric.high < 1.0


def test_samples_keep_the_line_number_of_the_file(passages):
    dataset, samples = task(passages, limit=2, seed=3).prepare()
    texts = [json.loads(line)["text"] for line in passages.read_text().splitlines()]
    assert (dataset.total, dataset.count, dataset.limit, dataset.seed) == (4, 2, 2, 3)
    assert [f"{each.text} {each.target}" for each in samples] == [
        texts[each.index] for each in samples
    ]


def test_bundled_passages_are_in_the_form_of_the_data_set():
    path = ROOT / "examples" / "passages.jsonl"
    dataset, samples = task(data_path=path).prepare()
    assert dataset.total >= 60
    assert len({sample.text for sample in samples}) == dataset.total
    assert all(sample.target.isalpha() for sample in samples)
    assert len({sample.target for sample in samples}) >= 50


def test_bundled_reference_belongs_to_the_bundled_passages():
    dataset, samples = task(data_path=ROOT / "examples" / "passages.jsonl").prepare()
    path = ROOT / "examples" / "gpt_books_5m" / "passages_reference.json"
    reference = read_baseline(path)
    reference.check("lambada", Lambada.version, dataset, samples)
    assert len(reference.predictions) == len(samples)
