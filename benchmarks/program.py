"""The shared parts of the benchmarks: a table of options, and rows that are printed and recorded.

python -m benchmarks.NAME --help
python -m benchmarks.NAME ... --case CASE --record benchmarks/results/CASE.json

A case is a table of options in cases.toml.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tomllib

from benchmarks.records import Record, name_of_program

ROOT = Path(__file__).resolve().parents[1]
# Row, column, and a value with its unit: "batch 1", "slipway fp32", "64.0 tokens/s".
Cell = tuple[str, str, str]
# Name of an option -> arguments of `add_argument`.
Options = Mapping[str, Mapping[str, Any]]
RowT = TypeVar("RowT")
CASES: Mapping[str, Mapping[str, Mapping[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("cases.toml").read_text(encoding="utf-8")
)

_OPTIONS: Options = {
    "work_dir": {"type": Path, "required": True, "help": "keeps the models"},
    "device": {"choices": ("cpu", "cuda"), "default": "cpu"},
    "batch": {"type": int, "nargs": "+", "default": [1, 8]},
    "input_len": {"type": int, "default": 32, "help": "tokens"},
    "output_len": {"type": int, "default": 32, "help": "tokens"},
    "data_type": {"choices": ("fp32", "fp16", "bf16")},
    "tp": {"type": int, "default": 1, "help": "GPUs"},
    "max_seq_len": {"type": int, "default": 1024, "help": "tokens of a prompt and its answer"},
    "repeats": {"type": int, "default": 5},
    "threads": {"type": int, "default": os.cpu_count() or 1},
}


def run(
    measure: Callable[[argparse.Namespace], Iterable[Cell]],
    document: str | None,
    options: Options,
) -> None:
    """Parse the command line, print each cell as it is measured, then the table.

    Args:
        measure: Receives the options, `work_dir` made.
        document: The program's docstring, its help.
        options: Name -> arguments of `add_argument`, over those in the table above.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in options.items():
        arguments = {**_OPTIONS.get(name, {}), **given}
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    parser.add_argument("--record", type=Path, help="file for a record of the run")
    cases = CASES.get(name_of_program().rpartition(".")[2], {})
    parser.add_argument("--case", choices=tuple(cases), help="options of cases.toml")
    chosen, _ = parser.parse_known_args()
    parser.set_defaults(**case_options(cases, chosen.case))
    args = parser.parse_args()
    if "work_dir" in args:
        args.work_dir.mkdir(parents=True, exist_ok=True)
        args.work_dir = args.work_dir.resolve()
    rows: dict[str, dict[str, str]] = {}
    for row, column, value in measure(args):
        print(f"{row}, {column}: {value}", file=sys.stderr, flush=True)
        rows.setdefault(row, {})[column] = value
    record = Record.of(rows)
    print(record.table())
    if args.record is not None:
        record.write(args.record)


def case_options(cases: Mapping[str, Mapping[str, Any]], name: str | None) -> Mapping[str, Any]:
    """Return the options of a case, with those of the case that it is `like`."""
    if name is None:
        return {}
    own = dict(cases[name])
    return {**case_options(cases, own.pop("like", None)), **own}


_made: Any  # what the process of a contender was started with


def own_process(make: Callable[..., Any], *given: Any) -> ProcessPoolExecutor:
    """Return one process, which first makes `make(*given)`, the first argument of its `call`s."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(make, *given))


def _begin(make: Callable[..., Any], *given: Any) -> None:
    global _made
    _made = make(*given)


def call(function: Callable[..., RowT], *given: Any) -> RowT:
    """Return `function(made, *given)`; it is submitted to a process with something made."""
    return function(_made, *given)


def rows_of_process(make: Callable[..., Iterator[RowT]], *given: Any) -> Iterator[RowT]:
    """Yield what `make(*given)` yields, each as soon as it is there, in a process of its own."""
    with own_process(make, *given) as process:
        while (row := process.submit(call, next, None).result()) is not None:
            yield row


def percentiles(
    row: str, seconds: Sequence[float], percents: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield rows of percentiles of two or more times, in milliseconds."""
    found = statistics.quantiles(seconds, n=100)
    for percent in percents:
        yield f"{row} p{percent}", f"{found[percent - 1] * 1e3:.2f} ms"
