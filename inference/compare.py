"""Command: compare evaluations, `python -m inference.compare FIRST SECOND [MORE ...]`."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from foundations.commands import command_parser, run_command, say
from foundations.files.replace import replace_file
from inference.evaluation.bounds import check_bounds, parse_bounds, sentences_of, unsuited
from inference.evaluation.gate import (
    EXIT_GATE_BREACHED,
    EXIT_INSUFFICIENT,
    EXIT_NOT_EVALUATED,
    EXIT_PASS,
    apply_gates,
)
from inference.evaluation.options import Bound, Bounds
from inference.evaluation.record import Report
from inference.evaluation.report.compare import ComparedRun, Run, SideBySide, compare_runs
from inference.evaluation.report.document import terminal_text
from inference.evaluation.report.files import REPORT_JSON, junit_text, read_run
from inference.evaluation.task import Metric

# Unit of a metric -> bound of an upgrade whose gate names none.
DEFAULT_BOUNDS = {
    "fraction": "no {word} of more than 1 point at 95 %",
    "perplexity": "no {word} of more than 1 % at 95 %",
}
_STATUSES = (EXIT_GATE_BREACHED, EXIT_NOT_EVALUATED, EXIT_INSUFFICIENT)  # worst first
_MAX_CHANGED, _MAX_TEXT = 14, 32  # changed samples in a terminal, and characters of their texts


def default_bounds(first: Report) -> dict[str, Bound]:
    """Return a bound for each metric of a report whose samples can be paired."""
    bounds = {}
    for metric in first.metrics:
        if metric.scale and (sentence := DEFAULT_BOUNDS.get(metric.unit)):
            word = "drop" if metric.higher_is_better else "rise"
            bound = Bound(paired=sentence.format(word=word))
            if not _unsuited(bound, metric):
                bounds[metric.name] = bound
    return bounds


def decide(runs: Mapping[str, Run | str], bounds: Bounds, output_dir: Path) -> tuple[str, int]:
    """Compare the later runs with the first, and write upgrade.html, .md, .json and junit.xml.

    A string in place of a run is the reason why it has no report. Returns the text for a terminal
    and the exit status: 3 if a run breaches a bound, 4 if a run has no metrics to compare, 5 if the
    samples do not show that all bounds hold, else 0.

    Raises:
        ValueError: the first run has no report, or a bound cannot be applied to it.
    """
    (name, first), *others = runs.items()
    if not others:
        raise ValueError(f"there is no run to compare with {name}")
    if isinstance(first, str):
        raise ValueError(f"the first run, {name}, has no report: {first}")
    bounds = dict(bounds) or default_bounds(first[0])
    if problems := _problems(bounds, first[0]):
        raise ValueError("\n".join(problems))
    found = {other: _compared(first, run, other, bounds) for other, run in others}
    failed = {other: reason for other, reason in found.items() if isinstance(reason, str)}
    compared = [run for run in found.values() if isinstance(run, ComparedRun)]
    gates = apply_gates([run.measured for run in compared], bounds)
    compared = [replace(run, gate=gate) for run, gate in zip(compared, gates, strict=True)]
    unjudged = [metric.name for metric in first[0].metrics if metric.name not in bounds]
    comparison = SideBySide(name, first[0], compared, failed, unjudged)
    page = comparison.page()
    statuses = {run.gate.exit_code for run in compared} | {EXIT_NOT_EVALUATED for _ in failed}
    status = next((code for code in _STATUSES if code in statuses), EXIT_PASS)
    record = {
        "schema_version": 1,
        "first": name,
        "runs": {run.name: {"run_id": run.report.run_id, **asdict(run.gate)} for run in compared},
        "failed": failed,
        "unjudged": unjudged,
        "bounds": {metric: asdict(bound) for metric, bound in bounds.items()},
        "exit_status": status,
    }
    suites = {run.name: run.gate.verdicts for run in compared}
    output_dir.mkdir(parents=True, exist_ok=True)
    for file, text in {
        "junit.xml": junit_text("slipway upgrade", gates=suites, errors=failed),
        "upgrade.md": page.text,
        "upgrade.html": page.html(),
        "upgrade.json": json.dumps(record, indent=1) + "\n",
    }.items():
        replace_file(output_dir / file, text)
    return _for_terminal(comparison), status


def _for_terminal(comparison: SideBySide) -> str:
    return terminal_text(comparison.text(most=_MAX_CHANGED, longest=_MAX_TEXT))


def _compared(first: Run, run: Run | str, name: str, bounds: Bounds) -> ComparedRun | str:
    """Return a run's comparison with the first, or the reason why its bounds cannot be applied."""
    if isinstance(run, str):
        return run
    if problems := _not_finite(run[0], bounds):
        return "; ".join(problems)
    methods = {metric.name: metric.method for metric in run[0].metrics}
    for metric in first[0].metrics:
        if metric.name in bounds and metric.name not in methods:
            return f"it did not measure {metric.name}"
        if metric.name in bounds and metric.method != methods[metric.name]:
            return (
                f"{metric.name} was measured in another way: first, {metric.method}; here, "
                f"{methods[metric.name]}"
            )
    found = compare_runs(first, run, name=name)
    if all(task.is_paired for task in found.tasks):
        return found
    return "its samples are not those of the first run, or were scored by other rules"


def _problems(bounds: Bounds, first: Report) -> list[str]:
    """Return the reasons why bounds cannot be applied to the samples of the first run."""
    metrics = {metric.name: metric for metric in first.metrics}
    if not bounds:
        return [
            "the first run has no metric that can be compared by samples and get worse; give a "
            "bound such as upgrade.gate.<metric>='no change of more than 1 point'."
        ]
    problems = [*check_bounds(bounds, known=[*metrics]), *_not_finite(first, bounds)]
    for name in sorted(bounds.keys() & metrics.keys()):
        problems += [f"{name}={problem}" for problem in _unsuited(bounds[name], metrics[name])]
    return problems


def _unsuited(bound: Bound, metric: Metric) -> list[str]:
    return unsuited(bound, metric) or [
        f"{sentence.text}: the first run's {metric.name} is {metric.value:g}, so no "
        f"{sentence.word} can be that large."
        for sentence in sentences_of(bound)
        if sentence.is_idle(metric)
    ]


def _not_finite(report: Report, bounds: Bounds) -> list[str]:
    return [
        f"{metric.name} is not a finite number"
        for metric in report.metrics
        if metric.name in bounds and not math.isfinite(metric.value)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare runs, print the differences and return the exit status."""
    parser = command_parser(
        "compare",
        "Compare evaluations with the first one.",
        "exit status: with --gate that of the gate, 0, 3, 4 or 5; 2 for wrong runs or options; "
        "else 0.",
        package="inference",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="a report.json, or its folder")
    add("--output", type=Path, help="also write the comparison as an HTML page")
    add("--gate", metavar="FOLDER", type=Path,
        help="apply bounds to the runs after the first, and write upgrade.html, .md, .json and "
        "junit.xml there")  # fmt: skip
    add("--bound", metavar="METRIC=SENTENCE", action="append", default=[],
        help="a bound of --gate, such as 'boolq_accuracy=no drop of more than 1 point at 95 %%' "
        "(default: 1 point of each share and 1 %% of each perplexity)")  # fmt: skip

    def handler(options: argparse.Namespace) -> int:
        try:
            text, status = _compare(options)
        except (ValueError, ImportError) as error:
            raise ValueError(str(error).replace("evaluate.gate.", "--bound ")) from error
        say(text)
        return status

    return run_command(parser, handler, arguments, refused=2)


def _compare(options: argparse.Namespace) -> tuple[str, int]:
    """Return the command's output and status. Raises ValueError for wrong options or runs."""
    if options.gate is None and options.bound:
        raise ValueError("--bound needs --gate FOLDER.")
    if options.gate is not None and options.output is not None:
        raise ValueError("--gate writes a page into its folder: leave --output out.")
    runs = _read(options.runs)
    if options.gate is not None:
        bounds, problems = parse_bounds(dict(text.partition("=")[::2] for text in options.bound))
        if problems:
            raise ValueError("\n".join(problems))
        return decide(runs, bounds, options.gate)
    first, *others = runs.values()
    compared = [compare_runs(first, run) for run in others]
    comparison = SideBySide(first[0].run_id, first[0], compared)
    text = _for_terminal(comparison)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.output, comparison.page().html())
        text += f"\n\npage: {options.output}"
    return text, EXIT_PASS


def _read(runs: Sequence[Path]) -> dict[str, Run]:
    """Read reports by the names of their folders, or by their run ids if two folders share one.

    Raises:
        ValueError: there are fewer than two, or one is missing or damaged.
    """
    paths = [(run / REPORT_JSON if run.is_dir() else run).absolute() for run in runs]
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"there is no report at {missing[0]}; name a report.json's folder.")
    found = {path: read_run(path) for path in paths}
    named: dict[str, Run] = {path.parent.name: run for path, run in found.items()}
    if len(named) < len(found):
        named = {run[0].run_id: run for run in found.values()}
    if len(named) < 2:
        raise ValueError("name at least two different runs.")
    return named


if __name__ == "__main__":
    sys.exit(main())
