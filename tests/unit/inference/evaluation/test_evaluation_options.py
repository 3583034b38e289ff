"""Problems of the options: all of them at once, in the configuration's words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inference.evaluation.gate import Bound
from inference.evaluation.options import (
    USE_CASES,
    EvaluationOptions,
    LambadaOptions,
    LatencyOptions,
    Shape,
    check_evaluation,
    parse_shape,
)


def problems(**changes) -> list[str]:
    return check_evaluation(
        EvaluationOptions(**{"output_dir": Path("out"), "data_dir": Path("data"), **changes})
    )


def test_the_defaults_are_sound():
    assert problems() == []


def test_an_unknown_task_is_answered_with_the_known_ones():
    (told,) = problems(tasks=("lambda",))
    assert told.startswith("unknown task 'lambda' in evaluate.tasks; known tasks: ")
    assert "lambada" in told


def test_all_problems_are_reported_together(tmp_path):
    found = problems(
        concurrency=0,
        limit=0,
        request_timeout_s=0,
        protocol="ftp",
        lambada=LambadaOptions(data_path=tmp_path / "gone.jsonl", metrics=("accuracy",)),
        latency=LatencyOptions(
            shapes=("60", "0+1"),
            batch_sizes=(),
            requests=0,
            warmup=-1,
            max_point_s=0,
            load_generator="ab",
        ),
    )
    expected = (
        "evaluate.protocol='ftp'",
        "evaluate.concurrency=0",
        "evaluate.limit=0",
        "evaluate.request_timeout_s=0",
        "unknown metric 'accuracy'",
        f"evaluate.lambada.data_path={tmp_path / 'gone.jsonl'}",
        "evaluate.latency.batch_sizes=[]",
        "evaluate.latency.requests=0",
        "evaluate.latency.shapes has '60'; write tokens in and out such as 60+20, or one of quest",
        "evaluate.latency.shapes has '0+1'",
        "evaluate.latency.warmup=-1",
        "evaluate.latency.max_point_s=0",
        "evaluate.latency.load_generator='ab'",
    )
    assert [told[: len(start)] for told, start in zip(found, expected, strict=True)] == list(
        expected
    )


def test_the_guide_s_use_cases_have_names():
    assert [parse_shape(name) for name in USE_CASES] == [
        Shape(60, 20),
        Shape(225, 20),
        Shape(200, 200),
    ]
    assert parse_shape("225+20") == USE_CASES["intent_classification"]


def test_latency_that_is_off_is_not_checked():
    assert problems(latency=LatencyOptions(enabled=False, requests=0)) == []


def test_a_bound_on_a_metric_that_is_not_measured_is_told():
    (told,) = problems(
        lambada=LambadaOptions(metrics=("lambada_last_word",)),
        gate={"lambada_last_token": Bound(min=0.1)},
    )
    assert told.startswith("evaluate.gate.lambada_last_token bounds a metric that is not measured")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"baseline": "compare"}, "evaluate.baseline=compare needs evaluate.baseline_path."),
        ({"baseline": "update"}, "evaluate.baseline=update needs evaluate.baseline_path."),
        ({"baseline": "yes"}, "evaluate.baseline='yes' is unknown; use none, compare or update."),
    ],
)
def test_a_baseline_needs_its_mode_and_its_path(changes, told):
    assert problems(**changes) == [told]


def test_a_missing_baseline_says_how_to_record_one(tmp_path):
    (told,) = problems(baseline="compare", baseline_path=tmp_path / "gone.json")
    assert "record a baseline first with evaluate.baseline=update" in told


def test_a_relative_bound_without_a_baseline_is_told():
    (told,) = problems(gate={"lambada_last_word": Bound(margin=0.01)})
    assert told.startswith("evaluate.gate.lambada_last_word is relative to a baseline, but")


def test_options_are_checked_without_heavy_imports():
    code = (
        "import sys; from inference.evaluation.options import check_evaluation; "
        "from inference.evaluation.record import RunFacts; import inference.evaluation; "
        "print({'torch', 'numpy', 'tritonclient', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
