"""Text tasks through one real server, against the library that the models come from.

The server has two small random models: a T5 with its ensemble, and a streaming GPT that is asked
with token ids. Both know a prompt table. What they should answer is computed by transformers, and
the figures from those answers by the standard library of each metric, or here.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from inference.evaluation.options import (
    EvaluationOptions,
    LatencyOptions,
    TextTaskOptions,
)
from inference.evaluation.record import Report, RunFacts, read_predictions
from inference.evaluation.run.evaluator import evaluate
from inference.server.kinds import SLIPWAY
from inference.server.server import ModelServer
from tests.integration.text_models import (
    ENGLISH,
    LABELS,
    PAIRS,
    PREFIX,
    TABLE_NAME,
    Source,
    add_model,
    gpt_source,
    likelier,
    t5_source,
)
from tests.integration.triton_process import hosted

START_LIMIT_S = 120


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return t5_source(tmp_path_factory.mktemp("t5_source"))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return gpt_source(tmp_path_factory.mktemp("gpt_source"))


@pytest.fixture(scope="module")
def server(
    t5: Source, gpt: Source, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    root = tmp_path_factory.mktemp("text_tasks")
    repository = root / "repository"
    add_model(repository, "fastertransformer", t5, tp_size=2)
    add_model(repository, "gpt", gpt, tp_size=1, ensemble=False, decoupled=True)
    with hosted(SLIPWAY, repository, root) as running:
        running.start(timeout_s=START_LIMIT_S)
        yield running


@dataclass(frozen=True)
class Asked:
    """A report and its answers in the order of the data."""

    report: Report
    answers: list[str]

    @property
    def values(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self.report.metrics}


def ask(options: EvaluationOptions) -> Asked:
    report = evaluate(options, RunFacts(name="tiny"))
    predictions = read_predictions(Path(options.output_dir, "predictions.jsonl"))
    return Asked(report, [each.answer for each in predictions])


def options(
    folder: Path,
    server: ModelServer,
    task: str,
    rows: Sequence[dict[str, Any]],
    **task_options: Any,
) -> EvaluationOptions:
    data_path = folder / f"{task}.jsonl"
    data_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own: dict[str, Any] = {task: TextTaskOptions(data_path=data_path, **task_options)}
    return EvaluationOptions(
        output_dir=folder / "out",
        data_dir=folder,
        url=server.address("grpc"),
        tasks=[task],
        **own,
        latency=LatencyOptions(enabled=False),
        concurrency=4,
    )


def share(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Return how many answers are right; a test with all or none of them would say little."""
    right = sum(answer == target for answer, target in zip(answers, targets, strict=True))
    assert 0 < right < len(targets)
    return right / len(targets)


TRANSLATIONS = [{"source": source, "target": target} for source, target in PAIRS]


def test_translation_equals_the_library_s(t5, server, tmp_path):
    asked = ask(options(tmp_path, server, "translation", TRANSLATIONS, output_len=6))
    expected = t5.answers([f"{PREFIX} {english}" for english in ENGLISH], output_len=6)
    assert asked.answers == expected
    assert len(set(expected)) > 1
    targets = [target for _, target in PAIRS]
    assert asked.values == {
        "translation_bleu": pytest.approx(
            sacrebleu.corpus_bleu(expected, [targets], force=True).score
        )
    }
    assert asked.report.tasks[0].requests.generated > 0


def f1(answer: str, target: str) -> float:
    shared = (Counter(answer.split()) & Counter(target.split())).total()
    return 2 * shared / (len(answer.split()) + len(target.split()))


BOOLQ = [
    {"passage": f"{one} ", "question": other, "answer": LABELS[number % 2]}
    for number, (one, other) in enumerate((one, other) for one in ENGLISH for other in ENGLISH)
]
BOOLQ_PROMPTS = [row["passage"] + row["question"] for row in BOOLQ]
BOOLQ_ANSWERS = [row["answer"] for row in BOOLQ]


@pytest.mark.parametrize("served", ["t5", "gpt"])
def test_boolq_of_a_tuned_model_equals_the_library_s(served, server, tmp_path, request):
    source: Source = request.getfixturevalue(served)
    model = "fastertransformer" if served == "t5" else "gpt"
    (table,) = (Path(server.model_repository) / model / "1").glob(f"*-gpu/{TABLE_NAME}")
    asked = ask(
        replace(
            options(tmp_path, server, "boolq", BOOLQ, output_len=1),
            weights_dir=table.parent,
            model_name=model,
            ensemble_name="ensemble" if served == "t5" else None,
            tokenizer_dir=None if served == "t5" else source.folder,
        )
    )
    expected = source.answers(BOOLQ_PROMPTS, output_len=1, tuned=True)
    assert asked.answers == expected
    assert expected != source.answers(BOOLQ_PROMPTS, output_len=1)
    assert asked.values == {"boolq_accuracy": share(expected, BOOLQ_ANSWERS)}


def test_boolq_by_likelihood_equals_the_library_s(gpt, server, tmp_path):
    asked = ask(
        replace(
            options(tmp_path, server, "boolq", BOOLQ, method="log_likelihood"),
            model_name="gpt",
            ensemble_name=None,
            tokenizer_dir=gpt.folder,
        )
    )
    expected = likelier(
        gpt, [f"{row['passage']}\nQuestion: {row['question']}\nAnswer:" for row in BOOLQ]
    )
    assert asked.answers == expected
    assert asked.values == {"boolq_accuracy": share(expected, BOOLQ_ANSWERS)}
    assert set(expected) == {"true", "false"}


def test_tokens_of_a_streaming_model_are_timed_as_they_come(gpt, server, tmp_path):
    latency = LatencyOptions(shapes=["6+9"], concurrencies=[2], requests=4, warmup=1)
    asked = ask(
        replace(
            options(tmp_path, server, "boolq", BOOLQ[:2], output_len=1),
            model_name="gpt",
            ensemble_name=None,
            tokenizer_dir=gpt.folder,
            latency=latency,
        )
    )
    (point,) = asked.report.latency
    assert point.streamed
    assert point.requests == 4
    assert point.first_token_ms is not None
    assert 0 < point.first_token_ms < point.latency.max_ms
    assert point.per_token_ms is not None
    # A request's time is that to its first token and those between the others.
    assert point.first_token_ms + point.per_token_ms < point.latency.max_ms


def test_the_latency_of_an_encoder_decoder_is_measured(server, tmp_path):
    latency = LatencyOptions(
        shapes=["6+3"], batch_sizes=[2], concurrencies=[1], requests=2, warmup=1
    )
    asked = ask(
        replace(
            options(tmp_path, server, "translation", TRANSLATIONS[:1], output_len=2),
            latency=latency,
        )
    )
    (point,) = asked.report.latency
    assert not point.streamed
    assert point.requests == 2
    assert 0 < point.generated <= 2 * 2 * 3
