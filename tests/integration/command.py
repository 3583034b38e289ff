"""The command as users type it, in a process of its own, for the tests of whole pipelines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FREE_PORTS = ("deploy.http_port=0", "deploy.grpc_port=0", "deploy.metrics_port=0")


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


def endpoint_of(
    path: Path, command: subprocess.Popen[str], *, restarts: int = 0, timeout_s: float = 120
) -> dict[str, Any]:
    """Return the address that a server publishes after so many restarts."""
    deadline = time.monotonic() + timeout_s
    while True:
        if path.exists():
            endpoint: dict[str, Any] = json.loads(path.read_text())
            if endpoint["restarts"] >= restarts:
                return endpoint
        assert command.poll() is None, command.stdout.read() if command.stdout else ""
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


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
