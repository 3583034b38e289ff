"""NVIDIA's perf_analyzer as load generator; it ships inside the tritonclient wheel.

It needs two shared libraries that the nvidia-pytriton wheel carries under other names. Its requests
hold what every generation model takes; the times are those it writes for each request.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from inference.evaluation.latency import Answered, Load
from inference.evaluation.options import EvaluationOptions
from inference.evaluation.runner import EvaluationError, RequestFailedError

_NAME = "perf_analyzer"
# Name the program asks for, and how the wheel's copy begins and goes on.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
_LAST_LINES = 8
_NS_PER_S = 1e9


class PerfAnalyzer:
    """Meets LoadGenerator by running perf_analyzer once per point."""

    def __init__(
        self, options: EvaluationOptions, *, program: Path, libraries: Path | None
    ) -> None:
        self._options = options
        self._program = program
        self._environment = dict(os.environ)
        if libraries is not None:
            found = [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]
            self._environment["LD_LIBRARY_PATH"] = ":".join(filter(None, found))

    def check(self) -> None:
        """Raise EvaluationError with the reason if the program does not start here."""
        done = subprocess.run(
            [str(self._program), "--version"],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise EvaluationError(
                f"{self._program} does not start here: {done.stderr.strip()}; set "
                "evaluate.latency.load_generator=client."
            )

    def send(self, load: Load) -> Answered:
        """Run one point.

        Raises:
            RequestFailedError: perf_analyzer failed; the message ends with its last lines.
        """
        with tempfile.TemporaryDirectory(prefix="slipway-perf-") as folder:
            data, profile = Path(folder, "data.json"), Path(folder, "profile.json")
            data.write_text(json.dumps(request_data(load)), encoding="utf-8")
            command = self._command(load, data, profile)
            done = subprocess.run(
                command, env=self._environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0 or not profile.is_file():
                lines = (done.stdout + done.stderr).strip().splitlines()[-_LAST_LINES:]
                raise RequestFailedError(
                    f"{_NAME} ended with status {done.returncode}:\n" + "\n".join(lines)
                )
            export = json.loads(profile.read_text(encoding="utf-8"))
        return read_profile(export, load, warmup=self._options.latency.warmup)

    def _command(self, load: Load, data: Path, profile: Path) -> list[str]:
        latency = self._options.latency
        return [
            str(self._program),
            "-m", self._options.model_name,
            "-u", self._options.url,
            "-i", self._options.protocol,
            "-b", str(load.batch_size),
            "--concurrency-range", str(load.concurrency),
            # It counts no warm-up of its own.
            "--request-count", str(latency.requests + latency.warmup),
            "--input-data", str(data),
            "--profile-export-file", str(profile),
        ]  # fmt: skip


def request_data(load: Load) -> dict[str, Any]:
    """Return the requests in perf_analyzer's form, one step per prompt."""
    return {
        "data": [
            {
                "input_ids": {"content": list(prompt), "shape": [len(prompt)]},
                "input_lengths": [len(prompt)],
                "request_output_len": {"content": [load.shape.output_len], "shape": [1]},
                "runtime_top_k": [1],
            }
            for prompt in load.prompts
        ]
    }


def read_profile(profile: dict[str, Any], load: Load, *, warmup: int) -> Answered:
    """Return times and tokens of a profile export without the first `warmup` requests."""
    (experiment,) = profile["experiments"]
    requests = sorted(experiment["requests"], key=lambda each: int(each["timestamp"]))[warmup:]
    begins = [each["timestamp"] for each in requests]
    ends = [each["response_timestamps"][-1] for each in requests]
    lengths = [_lengths(each["response_outputs"][-1]["sequence_length"]) for each in requests]
    return Answered(
        durations_s=[(end - begin) / _NS_PER_S for begin, end in zip(begins, ends, strict=True)],
        generated=sum(length - load.shape.input_len for each in lengths for length in each),
        seconds=(max(ends) - min(begins)) / _NS_PER_S,
    )


def _lengths(value: Any) -> list[int]:
    """Return the lengths of all rows; a single one is written without brackets."""
    return [int(each) for each in (value if isinstance(value, list) else [value])]


@contextmanager
def perf_analyzer(options: EvaluationOptions) -> Iterator[PerfAnalyzer]:
    """Yield the load generator of this environment.

    Raises:
        EvaluationError: perf_analyzer is not installed or does not start here.
    """
    beside = Path(sys.executable).with_name(_NAME)
    program = str(beside) if beside.is_file() else shutil.which(_NAME)
    if program is None:
        raise EvaluationError(
            "perf_analyzer was not found; it ships in the Linux wheels of tritonclient (2.50.0 "
            "runs on glibc 2.35). Install that, or set evaluate.latency.load_generator=client."
        )
    with tempfile.TemporaryDirectory(prefix="slipway-perf-") as folder:
        found = PerfAnalyzer(options, program=Path(program), libraries=_libraries(Path(folder)))
        found.check()
        yield found


def _libraries(folder: Path) -> Path | None:
    """Fill `folder` with links to the wheel's libraries under the names that are asked for."""
    try:
        wheel = metadata.distribution("nvidia-pytriton")
    except metadata.PackageNotFoundError:
        return None
    carried = Path(str(wheel.locate_file("nvidia_pytriton.libs")))
    for name, pattern in _LIBRARIES.items():
        for library in carried.glob(pattern):
            (folder / name).symlink_to(library)
    return folder
