"""Recovery time of a server after each fault, from the fault to the next answer.

    python -m benchmarks.recovery --work-dir DIR --record benchmarks/results/NAME.json
    python -m benchmarks.recovery --work-dir DIR [--repeats 2] [--server tritonserver]

Runs the deploy stage on the bundled 5M model with two ranks, kills or stops the processes of the
server one after another, each after some seconds of service, and sends HTTP requests throughout.
`noticed` is the time until readiness ends, `away` the time until the next server's first answer.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.program import ROOT, Cell, Options, run
from inference.server.processes import descendants

# Server -> (fault, words in the command line of the affected process, signal).
Fault = tuple[str, tuple[str, ...], int]
FAULTS: dict[str, tuple[Fault, ...]] = {
    "slipway": (
        ("server killed", ("inference.host.__main__",), 9),
        ("engine killed", ("inference.host.engine_process",), 9),
        ("rank 1 killed", ("inference.ranks.worker", "--rank"), 9),
        ("server stopped", ("inference.host.__main__",), 19),
        ("engine stopped", ("inference.host.engine_process",), 19),
        ("rank 1 stopped", ("inference.ranks.worker", "--rank"), 19),
    ),
    "tritonserver": (
        ("process of rank 0's model killed", ("python_backend_stub", "/fastertransformer/"), 9),
        ("process of `preprocessing` killed", ("python_backend_stub", "/preprocessing/"), 9),
        ("rank 1 killed", ("inference.ranks.worker", "--rank"), 9),
        ("`tritonserver` killed", ("bin/tritonserver", "--model-repository"), 9),
        ("`tritonserver` stopped", ("bin/tritonserver", "--model-repository"), 19),
        ("rank 1 stopped", ("inference.ranks.worker", "--rank"), 19),
        ("server killed", ("inference.host.__main__",), 9),
        ("server stopped", ("inference.host.__main__",), 19),
        ("supervisor killed", ("server.supervisor",), 9),
        ("supervisor stopped", ("server.supervisor",), 19),
    ),
}
_INPUTS = [
    {"name": "INPUT_0", "datatype": "BYTES", "shape": [1, 1], "data": ["It was"]},
    {"name": "INPUT_1", "datatype": "UINT32", "shape": [1, 1], "data": [2]},
]
_REQUEST = json.dumps({"inputs": _INPUTS}).encode()
_POLL_S = 0.02
_LIMIT_S = 120.0


@contextlib.contextmanager
def deployed(work_dir: Path, restarts: int, server: str) -> Iterator[tuple[int, Path]]:
    """Run the deploy stage; yield its process id and the file with its address."""
    words = ["export=gpt3/sample", "stages=[deploy]", f"base_results_dir={work_dir}"]
    words += [f"deploy.{name}_port=0" for name in ("http", "grpc", "metrics")]
    words += [f"deploy.max_restarts={restarts}", "deploy.restart_backoff_s=0"]
    words.append(f"deploy.server={server}")
    command = subprocess.Popen([sys.executable, "main.py", *words], cwd=ROOT)
    try:
        folder = work_dir / "gpt_books_5m" / "export_tp2_pp1_fp16_fp32" / "deploy"
        yield command.pid, folder / "endpoint.json"
    finally:
        command.terminate()  # in the background of a script SIGINT would be ignored
        command.wait()


def process(root: int, words: tuple[str, ...]) -> int:
    """Return the oldest descendant of `root` with all words in its command line.

    A supervisor's command line also has the server's words: it counts only if the words name it.
    Processes of a standby are younger.
    """
    for pid in sorted(descendants(root)):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            is_kind = ("server.supervisor" in line) == ("server.supervisor" in words)
            if is_kind and all(word in line for word in words):
                return pid
    raise RuntimeError(f"no process of {' '.join(words)}")


def is_answered(url: str, body: bytes | None = None, *, timeout_s: float) -> bool:
    """Return whether a server answers a request successfully and in time."""
    try:
        return bool(urllib.request.urlopen(url, data=body, timeout=timeout_s).status == 200)
    except OSError:
        return False


def recovery_times(start: float, path: Path, restarts: int) -> tuple[float, float]:
    """Return the seconds until readiness ends, and until the next server's first answer."""
    base = f"http://127.0.0.1:{json.loads(path.read_text())['http']}/v2"
    noticed = None
    while time.monotonic() - start < _LIMIT_S:
        is_ready = is_answered(f"{base}/health/ready", timeout_s=0.5)
        if noticed is None:
            noticed = None if is_ready else time.monotonic() - start
        elif is_ready and is_answered(f"{base}/models/ensemble/infer", _REQUEST, timeout_s=1.0):
            wait_for_address(path, restarts)
            return noticed, time.monotonic() - start
        time.sleep(_POLL_S)
    raise TimeoutError(f"no recovery within {_LIMIT_S:g} s")


def wait_for_address(path: Path, restarts: int) -> None:
    """Wait until the server after a number of restarts has published its address."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["restarts"] == restarts:
                return
        time.sleep(_POLL_S)
    raise TimeoutError(f"{path} was not updated within {_LIMIT_S:g} s")


def measure(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the medians of both times after each fault."""
    restarts = 0
    count = args.repeats * len(FAULTS[args.server])
    with deployed(args.work_dir, count, args.server) as (root, path):
        path.unlink(missing_ok=True)
        for name, words, signal_number in FAULTS[args.server]:
            times = []
            for _ in range(args.repeats):
                wait_for_address(path, restarts)
                time.sleep(args.serves_s)
                victim, start = process(root, words), time.monotonic()
                os.kill(victim, signal_number)
                restarts += 1
                times.append(recovery_times(start, path, restarts))
            noticed, away = (statistics.median(column) for column in zip(*times, strict=True))
            yield name, "noticed", f"{noticed:.1f} s"
            yield name, "away", f"{away:.1f} s"


OPTIONS: Options = {
    "work_dir": {"help": "folder that keeps the repository"},
    "repeats": {"default": 2},
    "serves_s": {"type": float, "default": 40.0, "help": "seconds of service before each fault"},
    "server": {"choices": tuple(FAULTS), "default": "slipway", "help": "deploy.server"},
}

if __name__ == "__main__":
    run(measure, __doc__, OPTIONS)
