"""The latency sweep: its prompts, its points, its failures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluation.options import EvaluationOptions, LatencyOptions
from inference.evaluation.run.latency import (
    Answered,
    Load,
    cut_prompts,
    encoder_request,
    measure_latency,
)
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import EvaluationError
from tests.conftest import present
from tests.ft_folders import write_bert

TEXTS = ("The cook lit the lamp", "They crossed the old stone bridge")
OPTIONS = LatencyOptions(
    shapes=["6+4", "6+1"],
    batch_sizes=[1, 2],
    concurrencies=[1, 3],
    requests=9,
    warmup=1,
    max_point_s=60,
)


def measure(model, tokens: Iterable[Sequence[int]], latency: LatencyOptions):
    return measure_latency(model, tokens, EvaluationOptions(data_dir=Path(), latency=latency))


def test_every_point_of_the_grid_is_measured(model):
    points = measure(model, map(model.encode, TEXTS), OPTIONS)
    assert [(each.output_len, each.batch_size, each.concurrency) for each in points] == [
        (4, 1, 1),
        (4, 1, 3),
        (4, 2, 1),
        (4, 2, 3),
        (1, 1, 1),
        (1, 1, 3),
        (1, 2, 1),
        (1, 2, 3),
    ]
    assert all(each.requests == 9 for each in points)
    assert [each.generated for each in points] == [36, 36, 72, 72, 9, 9, 18, 18]
    assert model.most_in_flight == 3


def test_the_first_token_is_measured_once_and_not_listed_unless_asked_for(model):
    options = LatencyOptions(
        shapes=["6+4", "6+3"], concurrencies=[1], requests=5, warmup=0, max_point_s=60
    )
    points = measure(model, map(model.encode, TEXTS), options)
    assert [each.output_len for each in points] == [4, 3]
    assert len(model.requests) == 3 * 5


@pytest.fixture
def answers(monkeypatch):
    def answer_by(send: Callable[[Load], Answered]) -> None:
        monkeypatch.setattr(
            "inference.evaluation.run.latency._send", lambda *given: send(given[-1])
        )

    return answer_by


def ticking(load: Load) -> Answered:
    """Requests that take 10 ms, and 2 ms more for each further token."""
    tokens = load.shape.output_len
    seconds = 0.010 + 0.002 * (tokens - 1)
    return Answered([seconds] * 4, 4 * tokens * load.batch_size, 4 * seconds)


def test_further_tokens_share_the_rest_of_the_latency(model, answers):
    answers(ticking)
    options = LatencyOptions(shapes=["6+1", "6+11"], batch_sizes=[3], concurrencies=[1])
    one, eleven = measure(model, map(model.encode, TEXTS), options)
    assert one.first_token_ms == pytest.approx(10.0)
    assert one.per_token_ms is None
    assert eleven.first_token_ms == pytest.approx(10.0)
    assert eleven.per_token_ms == pytest.approx(2.0)
    assert not eleven.streamed
    assert eleven.tokens_per_s == pytest.approx(3 * 11 / 0.030)


def streaming(load: Load) -> Answered:
    """Tokens that come after 10 ms, and then one every 3 ms."""
    arrivals_s = [[0.010 + 0.003 * token for token in range(load.shape.output_len)]] * 4
    ends_s = [each[-1] for each in arrivals_s]
    return Answered(ends_s, 4 * load.shape.output_len, sum(ends_s), arrivals_s)


def test_tokens_of_a_stream_are_timed_as_they_come(fake_model, answers):
    answers(streaming)
    options = LatencyOptions(shapes=["6+1", "6+5"], concurrencies=[1])
    model = fake_model(streams=True)
    one, five = measure(model, map(model.encode, TEXTS), options)
    assert one.first_token_ms == pytest.approx(10.0)
    assert one.per_token_ms is None
    assert five.first_token_ms == pytest.approx(10.0)
    assert five.first_token_p95_ms == pytest.approx(10.0)
    assert five.per_token_ms == pytest.approx(3.0)
    assert five.latency.p50_ms == pytest.approx(22.0)
    assert one.streamed
    assert five.streamed


def test_a_streaming_model_gets_no_requests_for_single_tokens(fake_model):
    model = fake_model(streams=True)
    options = LatencyOptions(
        shapes=["6+4"], concurrencies=[1], requests=5, warmup=0, max_point_s=60
    )
    (point,) = measure(model, map(model.encode, TEXTS), options)
    assert len(model.requests) == 5
    assert point.streamed
    assert 0 < present(point.first_token_ms) < point.latency.p50_ms


def test_a_point_ends_when_its_time_is_up(model):
    options = LatencyOptions(shapes=["6+1"], concurrencies=[1], requests=10**6, max_point_s=0.05)
    (point,) = measure(model, map(model.encode, TEXTS), options)
    assert 1 <= point.requests < 10**6


def test_a_failed_request_fails_the_measurement(fake_model):
    model = fake_model(unavailable=True)
    with pytest.raises(EvaluationError, match=r"latency of 6 \+ 4 tokens, batch 1, concurrency 1"):
        measure(model, map(model.encode, TEXTS), OPTIONS)


@pytest.mark.parametrize("input_len", [1, 5, 40])
def test_prompts_have_exactly_the_length_asked_for(model, input_len):
    prompts = cut_prompts(model.encode(TEXTS[0]), input_len=input_len)
    assert {len(prompt) for prompt in prompts} == {input_len}


def test_latency_needs_text():
    with pytest.raises(ValueError, match="needs some text"):
        cut_prompts([], input_len=4)


def test_an_encoder_is_measured_by_the_tokens_in(model, answers):
    model.inputs = ("input_ids", "sequence_length")
    options = LatencyOptions(
        shapes=["3+8", "5+8", "3+1"], batch_sizes=[2], concurrencies=[1], requests=4, warmup=1
    )
    points = measure(model, [range(10, 40)], options)
    assert [(each.input_len, each.output_len) for each in points] == [(3, 0), (5, 0)]
    assert len(model.tensors) == 2 * (4 + 1)
    assert model.tensors[0] == {
        "input_ids": [(10, 11, 12), (11, 12, 13)],
        "sequence_length": [[3], [3]],
    }
    answers(ticking)
    (point,) = measure(model, [range(30)], replace(options, shapes=["5+8"]))
    assert (point.first_token_ms, point.per_token_ms) == (None, None)
    assert point.tokens_per_s == pytest.approx(2 * 5 / (point.latency.p50_ms / 1000))


def test_an_encoder_of_embeddings_gets_rows_of_its_width(tmp_path):
    names = ("input_hidden_state", "sequence_lengths")
    served = EvaluationOptions(data_dir=Path(), weights_dir=write_bert(tmp_path))
    request = encoder_request([(1, 2, 3)] * 2, names, served)
    assert request["input_hidden_state"].shape == (2, 3, 24)
    assert request["sequence_lengths"] == [[3], [3]]
    with pytest.raises(EvaluationError, match="hidden size"):
        encoder_request([(1, 2, 3)], names, EvaluationOptions(data_dir=Path()))


def test_percentiles_are_in_milliseconds():
    found = distribution([0.001 * each for each in range(1, 202)])
    measured = (found.min_ms, found.mean_ms, found.p50_ms, found.p95_ms, found.p99_ms, found.max_ms)
    assert measured == pytest.approx((1, 101, 101, 191, 199, 201))


def test_nothing_measured_is_an_empty_distribution():
    assert distribution([]).count == 0
