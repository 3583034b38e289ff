"""Time of the submitting command: help, configuration, dry run, refusal.

    python -m benchmarks.login [--repeats 10]

Each is a whole process. The last column counts modules of heavy packages; it should be 0.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "tritonclient", "numpy")
SAMPLE = ["export=gpt3/sample"]
# Name -> arguments, and whether the command is to succeed.
COMMANDS = {
    "--help": (["--help"], True),
    "--cfg job": ([*SAMPLE, "--cfg", "job"], True),
    "dry run of four stages": ([*SAMPLE, "dry_run=true"], True),
    "refused tensor-parallel size": (
        [*SAMPLE, "export.model.tensor_model_parallel_size=3"],
        False,
    ),
}


def seconds(words: list[str], *, succeeds: bool) -> float:
    """Return the wall time of one command.

    Raises:
        RuntimeError: It ended with another status than expected.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "main.py", *words], cwd=ROOT, capture_output=True)
    passed = time.perf_counter() - start
    if (done.returncode == 0) is not succeeds:
        said = done.stderr.decode(errors="replace")
        raise RuntimeError(f"main.py {' '.join(words)} ended with {done.returncode}: {said}")
    return passed


def heavy_modules(words: list[str]) -> int:
    """Return the number of modules of heavy packages that one command imports."""
    trace = subprocess.run(
        [sys.executable, "-X", "importtime", "main.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stderr
    names = [line.split("|")[-1].strip() for line in trace.splitlines()]
    return sum(name.split(".")[0] in HEAVY for name in names)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    print("| main.py | median s | min..max s | heavy modules |")
    print("|---|---|---|---|")
    for name, (words, succeeds) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [*words, f"base_results_dir={folder}"] if "=" in words[0] else words
            times = [seconds(words, succeeds=succeeds) for _ in range(args.repeats + 1)][1:]
            print(
                f"| {name} | {statistics.median(times):.2f} "
                f"| {min(times):.2f}..{max(times):.2f} | {heavy_modules(words)} |"
            )


if __name__ == "__main__":
    main()
