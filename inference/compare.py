"""Command: compare two evaluations, `python -m inference.compare RUN_A RUN_B`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from export_scripts.commands import accept_any_text
from export_scripts.files.replace import replace_file
from inference.evaluation.report.compare import compare_runs, comparison_text, render_comparison
from inference.evaluation.report.files import read_run
from inference.evaluation.report.history import find_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences of two runs, write a page of them with --output; return the status."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.compare", description="Compare two evaluations."
    )
    parser.add_argument("first", help="a report.json or its folder, a run id, latest or latest~1")
    parser.add_argument("second", help="the run to compare with it")
    parser.add_argument("--history-dir", type=Path, help="run store that ids are looked up in")
    parser.add_argument("--output", type=Path, help="also write the comparison as an HTML page")
    options = parser.parse_args(arguments)
    accept_any_text()
    try:
        first, second = (
            read_run(find_run(run, history_dir=options.history_dir))
            for run in (options.first, options.second)
        )
        comparison = compare_runs(first, second)
        print(comparison_text(comparison))  # noqa: T201 - this is the command's output
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            replace_file(options.output, render_comparison(comparison))
            print(f"\npage: {options.output}")  # noqa: T201 - this is the command's output
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - this is the command's output
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
