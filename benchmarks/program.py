"""Shared code of the benchmarks: options, and rows that are printed and recorded.

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
    "work_dir": {"type": Path, "required": True, "help": "folder that keeps the models"},
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
    """Parse the command line, print each cell when it is measured, then the table.

    Args:
        measure: yields cells for the parsed options; `work_dir` exists.
        document: the program's docstring, which is its help.
        options: name -> arguments of `add_argument`, which override those of `_OPTIONS`.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, overrides in options.items():
        arguments = {**_OPTIONS.get(name, {}), **overrides}
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    parser.add_argument("--record", type=Path, help="file for the record of the run")
    cases = CASES.get(name_of_program().rpartition(".")[2], {})
    parser.add_argument("--case", choices=tuple(cases), help="named options of cases.toml")
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
    """Return the options of a case, over those of the case that it names as `like`."""
    if name is None:
        return {}
    options = dict(cases[name])
    return {**case_options(cases, options.pop("like", None)), **options}


_state: Any  # of a contender's process: the result of its `make`


def own_process(make: Callable[..., Any], *args: Any) -> ProcessPoolExecutor:
    """Start a process that holds the result of `make(*args)`, for functions sent with `call`."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(make, *args))


def _begin(make: Callable[..., Any], *args: Any) -> None:
    global _state
    _state = make(*args)


def call(function: Callable[..., RowT], *args: Any) -> RowT:
    """Call a function in an `own_process` with the process's state as its first argument."""
    return function(_state, *args)


def rows_of_process(make: Callable[..., Iterator[RowT]], *args: Any) -> Iterator[RowT]:
    """Yield the rows of `make(*args)`, which runs in its own process, as they are measured."""
    with own_process(make, *args) as process:
        while (row := process.submit(call, next, None).result()) is not None:
            yield row


def percentiles(
    row: str, seconds: Sequence[float], percents: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield a row for each percentile of at least two times, in milliseconds."""
    found = statistics.quantiles(seconds, n=100)
    for percent in percents:
        yield f"{row} p{percent}", f"{found[percent - 1] * 1e3:.2f} ms"
