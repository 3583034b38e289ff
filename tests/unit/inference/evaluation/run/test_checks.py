"""Problems of the options: all of them at once, in the configuration's words."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from inference.evaluation.options import (
    USE_CASES,
    EvaluationOptions,
    LambadaOptions,
    LatencyOptions,
    PromptOptions,
    RequestShape,
    TextTaskOptions,
    parse_shape,
)
from inference.evaluation.run import checks
from inference.evaluation.run.checks import check_evaluation
from inference.evaluation.tasks import TASKS
from inference.evaluation.tasks.text_task import TEXT_TASKS, TextTask
from tests.ft_folders import write_gpt
from tests.tiny_transformers import write_model


def problems(**changes) -> list[str]:
    options = {"output_dir": Path("out"), "data_dir": Path("data"), **changes}
    return [*check_evaluation(EvaluationOptions(**options))]


def test_the_defaults_are_sound():
    assert problems() == []


def test_an_unknown_task_is_answered_with_the_known_ones():
    (reported,) = problems(tasks=("lambda",))
    assert reported.startswith(
        "evaluate.tasks names 'lambda', which is not a task (did you mean lambada?); known tasks: "
    )
    assert "lambada" in reported


def test_all_problems_are_reported_together(tmp_path):
    found = problems(
        lambada=LambadaOptions(data_path=tmp_path / "gone.jsonl", metrics=["accuracy"]),
        latency=LatencyOptions(
            shapes=["60", "0+1"],
            batch_sizes=[],
        ),
    )
    expected = (
        "unknown metric 'accuracy'",
        f"evaluate.lambada.data_path={tmp_path / 'gone.jsonl'}",
        "evaluate.latency.batch_sizes is empty",
        "evaluate.latency.shapes has '60'; write tokens in and out such as 60+20, or one of quest",
        "evaluate.latency.shapes has '0+1'",
    )
    assert [
        reported[: len(start)] for reported, start in zip(found, expected, strict=True)
    ] == list(expected)


def test_the_guide_s_use_cases_have_names():
    assert [parse_shape(name) for name in USE_CASES] == [
        RequestShape(60, 20),
        RequestShape(225, 20),
        RequestShape(200, 200),
    ]
    assert parse_shape("225+20") == USE_CASES["intent_classification"]


def test_a_text_task_needs_its_data():
    (found,) = problems(tasks=("mnli",))
    assert found.startswith("evaluate.mnli.data_path is needed for the task mnli.")


def test_options_of_tasks_that_are_not_asked_for_are_not_checked(tmp_path):
    options = {"boolq": TextTaskOptions(data_path=tmp_path / "gone")}
    assert problems(**options) == []


@pytest.mark.parametrize(
    ("task", "changes", "reported"),
    [
        ("mnli", {"method": "log_likelihood"}, "evaluate.mnli.method=log_likelihood needs a task"),
        ("squad", {"target_path": Path(__file__)}, "evaluate.squad.target_path has no meaning"),
        (
            "boolq",
            {"prompt": PromptOptions(task_id=3)},
            "evaluate.boolq.prompt.task_id=3: None has no such prompt table",
        ),
        (
            "boolq",
            {"prompt": PromptOptions(append_ids=[3]), "method": "log_likelihood"},
            "evaluate.boolq.prompt cannot be used with",
        ),
    ],
)
def test_problems_of_text_tasks_are_reported(task, changes, reported):
    options = TextTaskOptions(data_path=Path(__file__), **changes)
    (found,) = problems(tasks=(task,), **{task: options})
    assert found.startswith(reported)


def test_a_task_s_package_is_asked_for(monkeypatch):
    kind = replace(TEXT_TASKS["translation"], package="not_installed_anywhere")
    monkeypatch.setitem(TASKS, "translation", partial(TextTask, kind))
    options = {"translation": TextTaskOptions(data_path=Path(__file__))}
    assert problems(tasks=("translation",), **options) == [
        "the task translation needs the package not_installed_anywhere: pip install "
        "not-installed-anywhere."
    ]


def test_metrics_of_text_tasks_can_be_bounded():
    options = {"squad": TextTaskOptions(data_path=Path(__file__))}
    gate = {"squad_f1": {"min": 0.5}}
    assert problems(tasks=("squad",), gate=gate, **options) == []


def shapes(*texts: str) -> LatencyOptions:
    return LatencyOptions(shapes=list(texts))


def test_shapes_longer_than_any_context_are_refused():
    (found,) = problems(latency=shapes("60+20", "99999+99999"))
    assert found.startswith("evaluate.latency.shapes has '99999+99999', 199998 tokens; ")


def test_shapes_that_the_served_model_has_no_room_for_are_refused(tmp_path):
    folder = write_gpt(tmp_path, max_pos_seq_len=80)
    fitting = shapes("60+20", "80+1")
    assert problems(weights_dir=folder, latency=fitting) == []
    (found,) = problems(weights_dir=folder, latency=shapes("60+20", "80+2"))
    assert found == (
        "evaluate.latency.shapes has 80+2, and this model allows 80 tokens in a sequence; lower it."
    )
    (found,) = problems(weights_dir=folder, max_seq_len=40, latency=shapes("40+2"))
    assert (
        "allows 40 tokens in a sequence; lower it, or raise export.triton_deployment.parameters"
        in found
    )
    # Nothing is known of another user's server.
    assert problems(weights_dir=folder, server="a:1", latency=shapes("80+2")) == []


def test_more_rows_than_the_server_takes_are_refused():
    latency = LatencyOptions(batch_sizes=[1, 9])
    (found,) = problems(latency=latency, max_batch_size=8)
    assert found.startswith("evaluate.latency.batch_sizes has 9, and the server takes 8 rows; ")
    assert problems(latency=latency, max_batch_size=9) == problems(latency=latency) == []


def test_the_checkpoint_bounds_shapes_before_it_is_converted(tmp_path):
    source = write_model("gpt2", tmp_path / "source")  # 40 positions
    (found,) = problems(source_path=source, weights_dir=tmp_path / "2-gpu", latency=shapes("40+2"))
    assert "this model allows 40 tokens in a sequence" in found


def test_latency_that_is_off_is_not_checked():
    assert problems(latency=LatencyOptions(enabled=False, shapes=["60"])) == []


def test_a_bound_on_a_metric_that_is_not_measured_is_reported():
    (reported,) = problems(
        lambada=LambadaOptions(metrics=["lambada_last_word"]),
        gate={"lambada_last_token": {"min": 0.1}},
    )
    assert reported.startswith(
        "evaluate.gate.lambada_last_token bounds a metric that is not measured"
    )


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"baseline": "compare"}, "evaluate.baseline=compare needs evaluate.baseline_path."),
        ({"baseline": "update"}, "evaluate.baseline=update needs evaluate.baseline_path."),
    ],
)
def test_a_baseline_needs_its_mode_and_its_path(changes, reported):
    (problem,) = problems(**changes)
    assert problem.startswith(reported)


def test_a_missing_baseline_says_how_to_record_one(tmp_path):
    (reported,) = problems(baseline="compare", baseline_path=tmp_path / "gone.json")
    assert "record a baseline first with evaluate.baseline=update" in reported


@pytest.mark.parametrize("name", ["", "file/baseline.json"])
def test_a_baseline_that_cannot_be_recorded_is_reported(tmp_path, name):
    (tmp_path / "file").touch()
    path = tmp_path / name
    (reported,) = problems(baseline="update", baseline_path=path)
    assert reported == (
        f"evaluate.baseline_path={path} cannot be written; name a file in a folder of yours."
    )


def test_a_relative_bound_without_a_baseline_is_reported():
    (reported,) = problems(gate={"lambada_last_word": "no change"})
    assert reported.startswith("evaluate.gate.lambada_last_word is relative to a baseline, but")


def test_options_are_checked_without_heavy_imports():
    code = (
        "import sys; from inference.evaluation.run.checks import check_evaluation; "
        "from inference.evaluation.record import RunFacts; import inference.evaluation.tasks; "
        "print({'torch', 'numpy', 'tritonclient', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"


def test_comparisons_need_the_package_of_their_statistics(monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    assert problems(gate={"lambada_last_word": {"min": 0.1}}) == []
    gate = {"lambada_last_word": {"paired": "no change"}}
    reported = problems(gate=gate, baseline="compare", baseline_path=Path(__file__))
    assert "needs the package scipy" in reported[-1]
