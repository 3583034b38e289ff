"""Records of benchmarks: write them, compare two of them, and put their tables into documents.

    python -m benchmarks.records compare OLD.json NEW.json --noise 5
    python -m benchmarks.records tables docs/performance.md

A record is a JSON file in `benchmarks/results`. `compare` prints the rows that got worse by more
than the noise, and exits with 1 if there are any. `tables` rewrites the tables of a document: the
table between the lines `<!-- record NAME -->` and `<!-- end -->` is that of the record NAME.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

from foundations.tables import markdown_table

RESULTS = Path(__file__).with_name("results")
_PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm", "flash-attn-4")
_LOWER_IS_BETTER = ("s", "ms", "us", "MB")
_TABLE = re.compile(r"(<!-- record ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Row -> contender -> value with its unit, such as "7016 tokens/s".
Rows = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Record:
    """One run of a benchmark."""

    command: str
    commit: str
    date: str  # ISO 8601, UTC
    machine: str
    versions: Mapping[str, str]
    rows: Rows

    @classmethod
    def of(cls, rows: Rows) -> Record:
        """Return the record of this process's run on this machine.

        The commit ends in "-dirty" if the checkout has changes.
        """
        git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        root = Path(__file__).parents[1]
        described = subprocess.run(git, cwd=root, capture_output=True, text=True, check=False)
        installed = {package.name: package.version for package in distributions()}
        return cls(
            command=" ".join(["python -m", name_of_program(), *sys.argv[1:]]),
            commit=described.stdout.strip() or "unknown",
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            machine=_machine(),
            versions={name: installed[name] for name in _PACKAGES if name in installed},
            rows=rows,
        )

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the record to a file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def table(self) -> str:
        """Return the rows as a Markdown table, with the facts needed to reproduce them."""
        names = list(dict.fromkeys(name for row in self.rows.values() for name in row))
        cells = [
            (row, *(values.get(name, "-") for name in names)) for row, values in self.rows.items()
        ]
        packages = ", ".join(f"{name} {found}" for name, found in self.versions.items())
        source = f"Commit {self.commit}, {self.date}, {self.machine}; {packages}:\n`{self.command}`"
        return f"{markdown_table(('', *names), cells)}\n\n{source}\n"


def name_of_program() -> str:
    """Return the name of the module that `python -m` runs."""
    program = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).stem if program is None else program.name


def regressions(old: Record, new: Record, *, noise: float) -> list[str]:
    """Return the rows that got worse by more than `noise`, a share, or are missing in `new`."""
    found = []
    for row, values in old.rows.items():
        for name, before in values.items():
            after = new.rows.get(row, {}).get(name, "absent")
            (one, unit), (other, new_unit) = _number(before), _number(after)
            remark = ""
            if one is not None and other is not None and unit == new_unit:
                if not min(one, other) > 0:
                    continue
                change = one / other if unit in _LOWER_IS_BETTER else other / one
                if change >= 1 - noise:
                    continue
                remark = f" ({change - 1:+.0%})"
            if before != after:
                found.append(f"{row}, {name}: {before}, now {after}{remark}")
    return found


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Return a document with its tables replaced by those of the records."""

    def table(match: re.Match[str]) -> str:
        record = Record.read(results / f"{match[2]}.json")
        return f"{match[1]}{record.table()}{match[3]}"

    return _TABLE.sub(table, text)


def _number(text: str) -> tuple[float | None, str]:
    """Split a value into its number and its unit; without a number, into None and the text."""
    number, _, unit = text.partition(" ")
    try:
        return float(number), unit
    except ValueError:
        return None, text


def _machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{len(names)} cores of {names[0] if names else platform.processor()}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two records, or rewrite a document's tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    compare.add_argument("--noise", type=float, default=5.0, help="percent")
    tables = commands.add_parser("tables")
    tables.add_argument("document", type=Path)
    args = parser.parse_args(argv)
    if args.command == "tables":
        text = with_tables(args.document.read_text(encoding="utf-8"))
        args.document.write_text(text, encoding="utf-8")
        return 0
    old, new = Record.read(args.old), Record.read(args.new)
    found = regressions(old, new, noise=args.noise / 100)
    print("\n".join(found) or f"no row got worse by more than {args.noise:g} %")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
