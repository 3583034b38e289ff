"""The processes of a server on several nodes follow its starts."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.system.launch_environment import RENDEZVOUS_VARIABLE
from stages.base import StageError
from stages.server_starts import (
    ServerStart,
    announce_start,
    lost_processes,
    read_start,
    run_for_each_start,
)
from tests.waiting import LIMIT_S, until


@contextmanager
def taking_part(folder: Path, script: str) -> Iterator[Callable[[], list[str]]]:
    """Run a part that follows the job "7"; yields what its command has written, by lines."""
    reported = folder / "reported"
    reported.touch()
    errors: list[BaseException] = []

    def part() -> None:
        try:
            run_for_each_start(
                folder,
                "7",
                command=[sys.executable, "-c", script, str(reported)],
                environment={},
            )
        except StageError as error:
            errors.append(error)

    thread = threading.Thread(target=part)
    thread.start()
    try:
        yield lambda: reported.read_text().splitlines()
    finally:
        ServerStart("7", 0).announce(folder)
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert not errors


# Writes where the ranks meet and its process id, and stays.
STAYS = f"""
import os, sys, time
with open(sys.argv[1], "a") as reported:
    reported.write(f"{{os.environ['{RENDEZVOUS_VARIABLE}']}} {{os.getpid()}}\\n")
time.sleep(600)
"""


def test_a_part_runs_its_command_anew_for_every_start_until_the_end(tmp_path):
    with taking_part(tmp_path, STAYS) as reported:
        first = announce_start(tmp_path, "7", 1)
        until(lambda: len(reported()) == 1)
        ServerStart("7", 1, is_over=True).announce(tmp_path)
        second = announce_start(tmp_path, "7", 2)
        until(lambda: len(reported()) == 2)
    assert [line.split()[0] for line in reported()] == [first.address, second.address]
    for line in reported():
        assert not Path(f"/proc/{line.split()[1]}").exists()


def test_a_command_that_is_stopped_makes_way_for_the_next_start_at_once(tmp_path):
    ended = tmp_path / "ended"
    # Only SIGTERM, which reaches a stopped process once it is resumed, makes it write.
    script = f"""
import pathlib, signal, sys
def end(*_):
    pathlib.Path({str(ended)!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
{STAYS}"""
    with taking_part(tmp_path, script) as reported:
        announce_start(tmp_path, "7", 1)
        until(lambda: len(reported()) == 1)
        os.kill(int(reported()[0].split()[1]), signal.SIGSTOP)
        announce_start(tmp_path, "7", 2)
        until(lambda: len(reported()) == 2)
        assert ended.exists()


def test_announcements_of_another_job_are_ignored(tmp_path):
    ServerStart("6", 0).announce(tmp_path)
    assert read_start(tmp_path, "7") is None
    with taking_part(tmp_path, STAYS) as reported:
        announce_start(tmp_path, "7", 1)
        until(lambda: len(reported()) == 1)


@pytest.mark.parametrize("is_end", [True, False])
def test_announcements_from_before_a_requeue_are_ignored(tmp_path, monkeypatch, is_end):
    if is_end:
        ServerStart("7", 0).announce(tmp_path)
    else:
        announce_start(tmp_path, "7", 1)
    assert read_start(tmp_path, "7") is not None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert read_start(tmp_path, "7") is None
    called = announce_start(tmp_path, "7", 1)
    assert read_start(tmp_path, "7") == called == ServerStart(**vars(called))


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")]
)
def test_a_part_that_is_killed_leaves_word_of_it(number, name, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    with taking_part(tmp_path, STAYS) as reported:
        announce_start(tmp_path, "7", 1)
        until(lambda: len(reported()) == 1)
        os.kill(int(reported()[0].split()[1]), number)
        said = lost_processes(tmp_path, "7", 1, wait_s=LIMIT_S)
    assert said == [f"rank 0 on n2 was ended by {name}"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert lost_processes(tmp_path, "7", 1, wait_s=0) == []
