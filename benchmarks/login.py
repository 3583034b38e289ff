"""Time of the submitting command: help, configuration, dry run, refusal.

    python -m benchmarks.login [--repeats 10]

Each is a whole process, its first run not counted.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from benchmarks.program import ROOT, Cell, run

_SAMPLE = "export=gpt3/sample"
# Name -> arguments, and the exit status.
_COMMANDS = {
    "--help": (["--help"], 0),
    "--cfg job": ([_SAMPLE, "--cfg", "job"], 0),
    "dry run of four stages": ([_SAMPLE, "dry_run=true"], 0),
    "refused tensor-parallel size": ([_SAMPLE, "export.model.tensor_model_parallel_size=3"], 2),
}


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the median and the longest time of each command."""
    for name, (words, status) in _COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "main.py", *words]
            if words[0] == _SAMPLE:
                command.append(f"base_results_dir={folder}")
            times = []
            for _ in range(args.repeats + 1):
                start = time.perf_counter()
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                times.append(time.perf_counter() - start)
                if done.returncode != status:
                    raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
            yield name, "median", f"{statistics.median(times[1:]):.2f} s"
            yield name, "slowest", f"{max(times[1:]):.2f} s"


if __name__ == "__main__":
    run(measure, __doc__, repeats={"default": 10})
