"""The evaluation through a real server: recorded figures and failures."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference.evaluation.options import (
    EvaluationOptions,
    LambadaOptions,
    LatencyOptions,
)
from inference.evaluation.record import (
    Report,
    RequestStatistics,
    RunFacts,
    TaskReport,
    read_predictions,
)
from inference.evaluation.run.baseline import write_baseline
from inference.evaluation.run.evaluator import evaluate
from inference.evaluation.run.timing import distribution
from inference.evaluation.task import EvaluationError, Prediction, sample_ids
from inference.evaluation.tasks.lambada import Lambada
from inference.server.kinds import SLIPWAY
from inference.server.server import ModelServer
from tests.conftest import ROOT, material, present
from tests.integration.triton_process import hosted

START_LIMIT_S = 120
PASSAGES = ROOT / "examples" / "passages.jsonl"
RECORDED = ROOT / "examples" / "gpt_books_5m" / "passages_reference.json"
FACTS = RunFacts(name="gpt_books_5m")
# Sums of about a hundred fp32 log probabilities near 5 carry about this much rounding.
LOG_PROB_TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def server(
    sample_repository: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    repository = sample_repository(tp_size=1)
    with hosted(SLIPWAY, repository, tmp_path_factory.mktemp("log")) as running:
        running.start(timeout_s=START_LIMIT_S)
        yield running


@pytest.fixture
def options(server: ModelServer, tmp_path: Path) -> EvaluationOptions:
    """Return options that ask for the bundled passages through the ensemble over gRPC."""
    return EvaluationOptions(
        output_dir=tmp_path / "out",
        data_dir=tmp_path,
        url=server.address("grpc"),
        lambada=LambadaOptions(data_path=PASSAGES),
        latency=LatencyOptions(enabled=False),
        concurrency=16,
    )


def assert_equals_recorded(options: EvaluationOptions, recorded: Path = RECORDED) -> Report:
    report = evaluate(replace(options, baseline="compare", baseline_path=recorded), FACTS)
    predictions = read_predictions(Path(options.output_dir) / "predictions.jsonl")
    assert len(predictions) == report.tasks[0].dataset.count
    for each in predictions:
        assert each.baseline
        for name, (former, found) in each.changes.items():
            assert name.endswith("log_prob")
            assert abs(found - former) < LOG_PROB_TOLERANCE
    return report


def test_every_bundled_passage_equals_the_reference(options, server):
    """All three metrics, text through the ensemble, encoded by the server itself."""
    report = assert_equals_recorded(options)
    assert len(report.baseline) == 3
    assert report.tasks[0].dataset.count == 64


def test_http_and_the_model_alone_give_the_same_figures(options, server):
    over_http = replace(
        options,
        url=server.address("http").removeprefix("http://"),
        protocol="http",
        ensemble_name=None,
        tokenizer_dir=Path(server.model_repository) / "preprocessing" / "1",
    )
    assert_equals_recorded(over_http)


def test_the_closest_decisions_of_lambada_equal_the_recorded_ones(options, shared, tmp_path):
    """Passages whose two best logits lie next to each other change first when anything does."""
    lines = material("data", "lambada_test.jsonl").read_text().splitlines()
    recorded = json.loads((shared / "sample_model" / "lambada.json").read_text())["per_passage"]
    chosen = sorted(range(len(lines)), key=lambda index: recorded[index][2])[:80]
    data_path = tmp_path / "closest.jsonl"
    data_path.write_text("".join(lines[index] + "\n" for index in chosen))
    names = ["lambada_last_token", "lambada_last_word"]
    lambada = LambadaOptions(data_path=data_path, metrics=names)
    dataset, samples = Lambada(replace(options, lambada=lambada)).prepare()
    predictions = []
    for each, index in zip(sample_ids(samples), chosen, strict=True):
        values = dict(zip(names, map(float, recorded[index]), strict=False))
        predictions.append(Prediction("lambada", index, id=each, values=values))
    requests = RequestStatistics(0, 0, 0.0, 0.0, distribution([]))
    own = TaskReport("lambada", Lambada.version, dataset, (), 0.0, requests)
    path = tmp_path / "reference.json"
    reference = Report("recorded figures", RunFacts("recorded"), "", 0.0, (own,))
    write_baseline(path, reference, predictions)
    assert_equals_recorded(replace(options, lambada=lambada), path)


def test_a_latency_sweep_is_measured(options):
    latency = LatencyOptions(shapes=["16+4"], batch_sizes=[2], concurrencies=[1, 2], requests=4)
    report = evaluate(replace(options, latency=latency, limit=2), FACTS)
    assert [point.concurrency for point in report.latency] == [1, 2]
    for point in report.latency:
        assert (point.requests, point.generated) == (4, 4 * 2 * 4)
        assert present(point.first_token_ms) > 0


def test_a_request_that_the_server_refuses_fails_the_evaluation(options, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "word " * 600 + "end"}) + "\n")
    lambada = LambadaOptions(data_path=path)
    with pytest.raises(EvaluationError, match="exceeds max_pos_seq_len"):
        evaluate(replace(options, lambada=lambada), FACTS)


def test_an_address_without_a_server_is_reported(options):
    with pytest.raises(EvaluationError, match=r"no ready server answers grpc requests at 127"):
        evaluate(replace(options, url="127.0.0.1:9"), FACTS)


def test_a_model_that_is_not_served_is_reported_with_those_that_are(options):
    with pytest.raises(EvaluationError, match=r"no ready model text_model; it serves .*ensemble"):
        evaluate(replace(options, ensemble_name="text_model"), FACTS)
