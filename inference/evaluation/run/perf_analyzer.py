"""NVIDIA's perf_analyzer as load generator; it ships inside the tritonclient wheel.

It needs two shared libraries that the nvidia-pytriton wheel carries under other names. Its requests
hold what every generation model takes; the times are those it writes for each request.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from inference.evaluation.options import EvaluationOptions
from inference.evaluation.run.latency import Answered, Load
from inference.evaluation.run.task_run import EvaluationError, RequestFailedError

logger = logging.getLogger(__name__)

_NAME = "perf_analyzer"
# Name the program asks for, and how the wheel's copy begins and goes on.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
_LAST_LINES = 8
_NS_PER_S = 1e9
# Two faults of perf_analyzer 2.50 end a run without its requests, and another run is the remedy:
# * For an output that a response leaves out it reports four bytes of unused memory. Where these do
#   not make a number its JSON writer gives up: status 0, and an export that is empty or breaks off.
#   That happens in about one run of twenty, by the addresses that the process gets.
# * A request that is answered before it begins to count is lost, and it waits for another for ever.
#   Small models on a busy machine are that fast.
_TRIES = 6
_PATIENCE = 5.0  # a run may take so many times what its requests take one after the other


class ServedTokens(Protocol):
    """The part of a served model that is needed here."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Return whether the model's inputs are those of T5."""
        ...

    @property
    def streams(self) -> bool:
        """Return whether answers come token by token."""
        ...

    def complete_rows(
        self, rows: Sequence[Sequence[int]], *, output_len: int
    ) -> list[tuple[int, ...]]:
        """Return the greedy tokens after each row, asked in one request."""
        ...


class PerfAnalyzer:
    """Meets LoadGenerator by running perf_analyzer once per point.

    A run may take `patience_s` longer than its requests should take.
    """

    def __init__(
        self,
        options: EvaluationOptions,
        model: ServedTokens,
        *,
        program: Path,
        libraries: Path | None,
        patience_s: float = 20.0,
    ) -> None:
        self._patience_s = patience_s
        self._options = options
        self._model = model
        self._program = program
        # It counts no warm-up of its own.
        self._requests = options.latency.requests + options.latency.warmup
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
        """Run one point, again where it ends without its requests.

        Raises:
            RequestFailedError: perf_analyzer failed; the message ends with its last lines.
        """
        limit_s = self._limit_s(load)
        for number in range(1, _TRIES + 1):
            ended, requests = self._run(load, limit_s)
            if len(requests) >= self._requests:
                is_t5 = self._model.is_encoder_decoder
                return read_requests(
                    requests,
                    warmup=self._options.latency.warmup,
                    prompt_len=0 if is_t5 else load.shape.input_len,
                    streams=self._model.streams,
                )
            logger.info("try %d of %d: %s %s", number, _TRIES, _NAME, ended)
        raise RequestFailedError(
            f"{_NAME} gave {len(requests)} of {self._requests} requests in the last of {_TRIES} "
            f"runs; set evaluate.latency.load_generator=client. It {ended}"
        )

    def _limit_s(self, load: Load) -> float:
        """Return how long a run may take, from what one of its requests takes."""
        start = time.perf_counter()
        self._model.complete_rows(load.prompts[: load.batch_size], output_len=load.shape.output_len)
        request_s = time.perf_counter() - start
        return self._patience_s + _PATIENCE * request_s * self._requests

    def _run(self, load: Load, limit_s: float) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return how one run ended, and the requests it exported by their beginning.

        Raises:
            RequestFailedError: it ended with an error.
        """
        with tempfile.TemporaryDirectory(prefix="slipway-perf-") as folder:
            data, profile = Path(folder, "data.json"), Path(folder, "profile.json")
            form = request_data(load, is_encoder_decoder=self._model.is_encoder_decoder)
            data.write_text(json.dumps(form), encoding="utf-8")
            try:
                done = subprocess.run(
                    self._command(load, data, profile),
                    env=self._environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                    timeout=limit_s,
                )
            except subprocess.TimeoutExpired:
                return f"did not end within {limit_s:.0f} s.", ()
            said = "\n".join(done.stdout.strip().splitlines()[-_LAST_LINES:])
            ended = f"ended with status {done.returncode}:\n{said}"
            if done.returncode != 0:
                raise RequestFailedError(f"{_NAME} {ended}")
            return ended, exported_requests(profile)

    def _command(self, load: Load, data: Path, profile: Path) -> list[str]:
        return [
            str(self._program),
            "-m", self._options.model_name,
            "-u", self._options.url,
            "-i", self._options.protocol,
            "-b", str(load.batch_size),
            "--concurrency-range", str(load.concurrency),
            "--request-count", str(self._requests),
            "--input-data", str(data),
            "--profile-export-file", str(profile),
            *(["--async", "--streaming"] if self._model.streams else []),
        ]  # fmt: skip


def request_data(load: Load, *, is_encoder_decoder: bool = False) -> dict[str, Any]:
    """Return the requests in perf_analyzer's form, one step per prompt."""
    lengths, output_len = (
        ("sequence_length", "max_output_len")
        if is_encoder_decoder
        else ("input_lengths", "request_output_len")
    )
    return {
        "data": [
            {
                "input_ids": {"content": list(prompt), "shape": [len(prompt)]},
                lengths: [len(prompt)],
                output_len: {"content": [load.shape.output_len], "shape": [1]},
                "runtime_top_k": [1],
            }
            for prompt in load.prompts
        ]
    }


def exported_requests(profile: Path) -> list[Mapping[str, Any]]:
    """Return the requests of an export by their beginning; none where it is not whole."""
    try:
        (experiment,) = json.loads(profile.read_text(encoding="utf-8"))["experiments"]
    except (FileNotFoundError, ValueError):
        return []
    return sorted(experiment["requests"], key=lambda each: int(each["timestamp"]))


def read_requests(
    requests: Sequence[Mapping[str, Any]], *, warmup: int, prompt_len: int, streams: bool
) -> Answered:
    """Return times and tokens of exported requests without the first `warmup`.

    `prompt_len` are the prompt's tokens, which a response's sequence_length also counts.
    """
    counted = requests[warmup:]
    begins = [each["timestamp"] for each in counted]
    responses = [each["response_timestamps"] for each in counted]
    lengths = [_lengths(each["response_outputs"][-1]["sequence_length"]) for each in counted]
    arrivals = [
        [(each - begin) / _NS_PER_S for each in stamps]
        for begin, stamps in zip(begins, responses, strict=True)
    ]
    return Answered(
        durations_s=[each[-1] for each in arrivals],
        generated=sum(length - prompt_len for each in lengths for length in each),
        seconds=(max(each[-1] for each in responses) - min(begins)) / _NS_PER_S,
        arrivals_s=arrivals if streams else (),
    )


def _lengths(value: Any) -> list[int]:
    """Return the lengths of all rows; a single one is written without brackets."""
    return [int(each) for each in (value if isinstance(value, list) else [value])]


@contextmanager
def perf_analyzer(options: EvaluationOptions, model: ServedTokens) -> Iterator[PerfAnalyzer]:
    """Yield the load generator of this environment for the model served at `options.url`.

    Raises:
        EvaluationError: perf_analyzer is not installed or does not start here.
    """
    own = Path(sys.executable).with_name(_NAME)
    program = str(own) if own.is_file() else shutil.which(_NAME)
    if program is None:
        raise EvaluationError(
            "perf_analyzer was not found; it ships in the Linux wheels of tritonclient (2.50.0 "
            "runs on glibc 2.35). Install that, or set evaluate.latency.load_generator=client."
        )
    with tempfile.TemporaryDirectory(prefix="slipway-perf-") as folder:
        libraries = _libraries(Path(folder))
        found = PerfAnalyzer(options, model, program=Path(program), libraries=libraries)
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
