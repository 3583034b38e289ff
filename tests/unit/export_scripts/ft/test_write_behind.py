"""Steps to the disk run in order behind a worker, and no failure of theirs is lost."""

import contextlib
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from export_scripts.ft.writer import WriteBehind


@pytest.fixture
def queue() -> Iterator[WriteBehind]:
    with contextlib.closing(WriteBehind()) as made:
        yield made


def fail() -> None:
    raise OSError("broken")


def test_a_step_runs_while_its_maker_goes_on(queue):
    go = threading.Event()
    queue.run(lambda: go.wait(60))
    go.set()  # reached although the step has not ended
    queue.wait()


def test_no_second_step_starts_before_the_first_is_done(queue):
    done: list[int] = []
    for number in range(50):
        queue.run(partial(done.append, number))
        assert done[:number] == list(range(number))
    queue.wait()
    assert done == list(range(50))


def test_a_failure_reaches_whoever_starts_the_next_step(queue):
    queue.run(fail)
    with pytest.raises(OSError, match="broken"):
        queue.run(lambda: None)
    queue.wait()  # reported once


def test_nothing_follows_a_failed_step(queue):
    done = []
    queue.run(fail)
    queue.run_next(lambda: done.append(1))
    with pytest.raises(OSError, match="broken"):
        queue.wait()
    assert done == []
