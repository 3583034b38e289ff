"""Check the options of an evaluation before anything runs."""

from collections.abc import Iterator
from importlib.util import find_spec

from foundations.errors import problem_of
from foundations.files.disk import folder_problem
from foundations.files.json_content import Table
from foundations.suggest import did_you_mean
from inference.evaluation.bounds import check_bounds, parse_bounds
from inference.evaluation.options import (
    Bounds,
    EvaluationOptions,
    parse_shape,
)
from inference.evaluation.run.baseline import read_baseline
from inference.evaluation.tasks import TASKS, known_tasks, make_task
from inference.evaluation.tasks.harness import PREFIX
from inference.evaluation.tasks.served_folder import shape_problems


def check_gate(gate: Table, options: EvaluationOptions) -> Iterator[str]:
    """Yield the problems of bounds that are invalid, or on metrics that are not measured."""
    tasks = known_tasks(options)
    bounds, problems = parse_bounds(gate)
    known = [name for task in tasks for name in task.metric_names]
    grouped = tuple(f"{name}_" for task in tasks if task.grouped for name in task.metric_names)
    # Groups are known only from the data: `check_bounds_of_groups` checks their bounds.
    ungrouped = {name: each for name, each in bounds.items() if not name.startswith(grouped)}
    yield from problems
    yield from check_bounds(ungrouped, known=known)


def check_evaluation(options: EvaluationOptions) -> Iterator[str]:
    """Yield every problem of the options that can be found without a server.

    Types and ranges are checked when the configuration is read. The messages use its keys
    (`evaluate.concurrency`).
    """
    yield from (
        f"evaluate.tasks names {name!r}, which is not a task{did_you_mean(name, TASKS)}; known "
        f"tasks: {', '.join(sorted(TASKS))}, and {PREFIX}<any task of lm-evaluation-harness>."
        for name in options.tasks
        if make_task(name, options) is None
    )
    if not (options.tasks or options.latency.enabled):
        yield "evaluate.tasks is empty; name at least one task, such as [lambada]."
    yield from options.credentials.problems(prefix="evaluate.", joiner="_")
    tasks = known_tasks(options)
    for task in tasks:
        yield from task.problems()
    yield from (
        f"evaluate.advisory has {name}, which is not in evaluate.tasks; add it there."
        for name in options.advisory
        if name not in options.tasks
    )
    yield from _check_latency(options)
    bounds, _ = parse_bounds(options.gate)
    yield from check_gate(options.gate, options)
    yield from _check_baseline(options, bounds)
    is_compared = any(bound.is_relative for bound in bounds.values())
    if is_compared and find_spec("scipy") is None:
        yield (
            "comparing with a baseline needs the package scipy: pip install scipy, or leave "
            "sentences out of evaluate.gate."
        )


def _check_latency(options: EvaluationOptions) -> Iterator[str]:
    latency = options.latency
    if not latency.enabled:
        return
    yield from (
        f"evaluate.latency.{key} is empty; name at least one, such as {example}."
        for key, values, example in (
            ("shapes", latency.shapes, "60+20"),
            ("batch_sizes", latency.batch_sizes, "1"),
            ("concurrencies", latency.concurrencies, "1"),
        )
        if not values
    )
    largest, most = max(latency.batch_sizes, default=0), options.max_batch_size
    if most is not None and largest > most:
        yield (
            f"evaluate.latency.batch_sizes has {largest}, and the server takes {most} rows; lower "
            "it, or raise export.triton_deployment.max_batch_size."
        )
    wrong = [found for text in latency.shapes if (found := problem_of(parse_shape, text))]
    yield from wrong or shape_problems([parse_shape(text) for text in latency.shapes], options)


def _check_baseline(options: EvaluationOptions, bounds: Bounds) -> list[str]:
    if options.baseline == "none":
        return [
            f"evaluate.gate.{name} is relative to a baseline, but evaluate.baseline=none; set "
            "evaluate.baseline=compare and evaluate.baseline_path."
            for name, bound in bounds.items()
            if bound.is_relative
        ]
    if options.baseline not in ("compare", "update"):
        return []  # refused by its choices
    if options.baseline_path is None:
        return [f"evaluate.baseline={options.baseline} needs evaluate.baseline_path."]
    path = options.baseline_path
    if options.baseline == "update":
        if not (path.is_dir() or folder_problem(path.parent)):
            return []
        return [
            f"evaluate.baseline_path={path} cannot be written; name a file in a folder of yours."
        ]
    if not path.is_file():
        return [
            f"evaluate.baseline_path={path} does not exist; record a baseline first with "
            "evaluate.baseline=update."
        ]
    try:
        return read_baseline(path).problems(bounds)
    except ValueError as error:
        return [f"evaluate.baseline_path: {error}"]


def unreachable_data(options: EvaluationOptions) -> list[str]:
    """Return a problem for each data set that is missing."""
    return [problem for task in known_tasks(options) if (problem := task.data_problem())]
