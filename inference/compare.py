"""Command: compare evaluations, `python -m inference.compare FIRST SECOND [MORE ...]`."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from export_scripts.commands import accept_any_text
from export_scripts.files.replace import replace_file
from inference.evaluation.bounds import check_bounds, parse_bounds, unsuited
from inference.evaluation.gate import (
    EXIT_GATE_BREACHED,
    EXIT_INSUFFICIENT,
    EXIT_NOT_EVALUATED,
    EXIT_PASS,
)
from inference.evaluation.options import Bound
from inference.evaluation.record import Report
from inference.evaluation.report.compare import (
    IN_TERMINAL,
    ComparedRun,
    Run,
    compare_runs,
    comparison_page,
    comparison_text,
    judged,
)
from inference.evaluation.report.document import terminal_text
from inference.evaluation.report.files import read_run, verdicts_junit
from inference.evaluation.report.history import find_run

# Bounds of an upgrade for each metric by its unit, unless its gate names bounds.
DEFAULT_BOUNDS = {
    "fraction": "no {word} of more than 1 point at 95 %",
    "perplexity": "no {word} of more than 1 % at 95 %",
}
_STATUSES = (EXIT_GATE_BREACHED, EXIT_NOT_EVALUATED, EXIT_INSUFFICIENT)  # the worst first
_MOST_TEXT = 32  # characters of an answer in the terminal
_UNPAIRED = "its samples are not those of the first run, or were scored by other rules"


def default_bounds(first: Report) -> dict[str, Bound]:
    """Return a bound for each figure of a report that has samples to be paired by."""
    bounds = {}
    for metric in first.metrics:
        if metric.scale and (sentence := DEFAULT_BOUNDS.get(metric.unit)):
            word = "drop" if metric.higher_is_better else "rise"
            bounds[metric.name] = Bound(paired=sentence.format(word=word))
    return bounds


def decide(
    runs: Mapping[str, Run | str], bounds: Mapping[str, Bound], output_dir: Path
) -> tuple[str, int]:
    """Judge the runs after the first against it, and write upgrade.html, .md, .json and junit.xml.

    A run without a report is the reason why it has none. Returns the text for a terminal and the
    exit status: 3 if a bound is breached in a run, 4 if a run has no figures to compare, 5 if the
    samples do not show that all bounds hold, else 0.

    Raises:
        ValueError: the first run has no report, or a bound cannot be applied to it.
    """
    (name, first), *others = runs.items()
    if not others:
        raise ValueError(f"there is no run to compare with {name}")
    if isinstance(first, str):
        raise ValueError(f"{name}, which the others are compared with, has no report: {first}")
    bounds = dict(bounds) or default_bounds(first[0])
    if problems := _problems(bounds, first[0]):
        raise ValueError("\n".join(problems))
    failed: dict[str, str] = {}
    compared: list[ComparedRun] = []
    for other, run in others:
        found = run if isinstance(run, str) else _compared(first, run, other, bounds)
        if isinstance(found, str):
            failed[other] = found
        else:
            compared.append(found)
    compared = judged(first[0], compared, bounds)
    unjudged = [metric.name for metric in first[0].metrics if metric.name not in bounds]
    known: Any = {"name": name, "failed": failed, "unjudged": unjudged}
    page = comparison_page(first[0], compared, **known)
    statuses = {run.gate.exit_code for run in compared} | {EXIT_NOT_EVALUATED for _ in failed}
    status = next((each for each in _STATUSES if each in statuses), EXIT_PASS)
    record = {
        "schema_version": 1,
        "first": name,
        "runs": {run.name: {"run_id": run.report.run_id, **asdict(run.gate)} for run in compared},
        "failed": failed,
        "unjudged": unjudged,
        "bounds": {each: asdict(bound) for each, bound in bounds.items()},
        "exit_status": status,
    }
    suites = {run.name: run.gate.verdicts for run in compared}
    output_dir.mkdir(parents=True, exist_ok=True)
    for file, text in {
        "junit.xml": verdicts_junit(suites, failed),
        "upgrade.md": page.text,
        "upgrade.html": page.html(),
        "upgrade.json": json.dumps(record, indent=1) + "\n",
    }.items():
        replace_file(output_dir / file, text)
    return _for_terminal(first[0], compared, **known), status


def _for_terminal(first: Report, compared: Sequence[ComparedRun], **known: Any) -> str:
    text = comparison_text(first, compared, most=IN_TERMINAL, longest=_MOST_TEXT, **known)
    return terminal_text(text)


def _compared(first: Run, run: Run, name: str, bounds: Mapping[str, Bound]) -> ComparedRun | str:
    """Return a run next to the first, or why the bounds cannot be applied to it."""
    ways = {metric.name: metric.method for metric in run[0].metrics}
    if problems := _not_numbers(run[0], bounds):
        return "; ".join(problems)
    for metric in first[0].metrics:
        if metric.name not in bounds:
            continue
        if metric.name not in ways:
            return f"it did not measure {metric.name}"
        if metric.method != ways[metric.name]:
            return (
                f"{metric.name} was measured in another way: first, {metric.method}; here, "
                f"{ways[metric.name]}"
            )
    found = compare_runs(first, run, name=name)
    return found if found.is_paired else _UNPAIRED


def _problems(bounds: Mapping[str, Bound], first: Report) -> list[str]:
    """Return the bounds that cannot be applied to samples of the first run."""
    metrics = {metric.name: metric for metric in first.metrics}
    if not bounds:
        return [
            "the first run has no figure that can be compared by samples; give a bound such as "
            "upgrade.gate.<metric>='no change of more than 1 point'."
        ]
    problems = check_bounds(bounds, known=[*metrics])
    problems += _not_numbers(first, bounds)
    for name in bounds.keys() & metrics.keys():
        problems += [f"{name}={each}" for each in unsuited(bounds[name], metrics[name])]
    return problems


def _not_numbers(report: Report, bounds: Mapping[str, Bound]) -> list[str]:
    return [
        f"{each.name} is not a number"
        for each in report.metrics
        if each.name in bounds and math.isnan(each.value)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences of runs, write a page of them with --output; return the status."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.compare", description="Compare evaluations with the first one."
    )
    parser.add_argument("runs", nargs="+", help="a report.json, its folder, a run id, or latest~1")
    parser.add_argument("--history-dir", type=Path, help="run store that ids are looked up in")
    parser.add_argument("--output", type=Path, help="also write the comparison as an HTML page")
    parser.add_argument(
        "--gate",
        metavar="FOLDER",
        type=Path,
        help="judge the runs after the first, write upgrade.html, .md, .json and junit.xml there, "
        "and return the status of the gate: 0, 3, 4 or 5",
    )
    parser.add_argument(
        "--bound",
        metavar="METRIC=SENTENCE",
        action="append",
        default=[],
        help="what --gate asks, such as 'boolq_accuracy=no drop of more than 1 point at 95 %%'; "
        "without one, 1 point of each share and 1 %% of each perplexity",
    )
    options = parser.parse_args(arguments)
    accept_any_text()
    try:
        if len(options.runs) < 2:
            raise ValueError("name at least two runs.")
        if options.gate is None and options.bound:
            raise ValueError("--bound is for --gate: name its folder, too.")
        if options.gate is not None and options.output is not None:
            raise ValueError("--gate writes a page into its folder: leave --output out.")
        paths = [find_run(run, history_dir=options.history_dir) for run in options.runs]
        found = [(path.parent.name, read_run(path)) for path in paths]
        runs = dict(found)
        if len(runs) < len(found):
            runs = {run[0].run_id: run for _, run in found}
        if len(runs) < 2:
            raise ValueError("they are one and the same run; name another one.")
        if options.gate is not None:
            bounds, problems = parse_bounds(
                dict(each.partition("=")[::2] for each in options.bound)
            )
            if problems:
                raise ValueError("\n".join(problems))
            text, status = decide(runs, bounds, options.gate)
            print(text)  # noqa: T201 - this is the command's output
            return status
        first, *others = runs.values()
        compared = [compare_runs(first, each) for each in others]
        print(_for_terminal(first[0], compared))  # noqa: T201 - this is the command's output
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.output, comparison_page(first[0], compared).html())
            print(f"\npage: {options.output}")  # noqa: T201 - this is the command's output
    except (ValueError, OSError, ImportError) as error:
        text = str(error).replace("evaluate.gate.", "--bound ")
        print(f"error: {text}", file=sys.stderr)  # noqa: T201 - this is the command's output
        return 2
    return EXIT_PASS


if __name__ == "__main__":
    sys.exit(main())
