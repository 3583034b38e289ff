"""The command as users type it, in a process of its own, for the tests of whole pipelines."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher_scripts.main import main
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = ("deploy.http_port=0", "deploy.grpc_port=0", "deploy.metrics_port=0")


def run(*words: str) -> tuple[int, str]:
    """Run the command in this process; return its status and what it printed."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        status = main(words)
    return status, shown.getvalue()


def start(*words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "main.py", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command: subprocess.Popen[str], *, timeout_s: float = 120) -> str:
    """Wait for the end of the command, interrupting it when it takes too long."""
    try:
        text, _ = command.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        text, _ = command.communicate(timeout=60)
        raise AssertionError(f"the command did not end within {timeout_s} s:\n{text}") from None
    return text


def processes_of(results: Path) -> dict[int, str]:
    """Return the command lines of processes that work below a results folder, by their ids."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(results) in command and int(entry.name) != os.getpid():
                found[int(entry.name)] = command
    return found


def endpoint_of(
    path: Path, command: subprocess.Popen[str], *, restarts: int = 0, timeout_s: float = 120
) -> dict[str, Any]:
    """Return the address that a server publishes after so many restarts."""

    def is_there() -> bool:
        assert command.poll() is None, command.stdout.read() if command.stdout else ""
        return path.exists() and json.loads(path.read_text())["restarts"] >= restarts

    until(is_there, f"the appearance of {path}", limit_s=timeout_s)
    endpoint: dict[str, Any] = json.loads(path.read_text())
    return endpoint


@contextmanager
def served(results: Path, *words: str, **more: Any) -> Iterator[dict[str, Any]]:
    """Run the command, yield the address of its server, and end it as Ctrl-C does."""
    command = start(*words, **more)
    try:
        yield endpoint_of(results / "deploy" / "endpoint.json", command)
    finally:
        command.send_signal(signal.SIGINT)
        text = finish(command)
    assert command.returncode == 0, text
