"""Several runs of one command: the rows of `action=upgrade`, or the combinations of a sweep.

All of them are composed and checked before the first starts.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.settings import EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.invocation import prepare_run
from launcher_scripts.launchers.slurm_state import queue_now
from launcher_scripts.run import Run

_ROOM_WAIT_S, _ROOM_POLL_S = 60.0, 2.0


@dataclass
class NamedRun:
    """A run by its name, and its exit status; None before its end."""

    name: str
    run: Run
    status: int | None = None


def prepare_rows(
    command_lines: Mapping[str, Sequence[str]],
    compose: Callable[[Sequence[str]], Composition],
    words: Sequence[str],
    console: Console,
) -> tuple[list[NamedRun], list[str]]:
    """Return the runs that have no problem, and the problems of all.

    Args:
        command_lines: The overrides of each row by its name.
        compose: Makes a configuration of them.
        words: The command line that the rows were given on.
        console: Receives remarks.
    """
    rows: list[NamedRun] = []
    said: dict[str, list[str]] = {}
    queue = functools.cache(queue_now)
    for name, overrides in command_lines.items():
        composition = compose(overrides)
        found = list(composition.problems)
        run = prepare_run(composition, words, console, found, label=name, queue=queue)
        if run is not None:
            rows.append(NamedRun(name, run))
        for text in found:
            said.setdefault(text, []).append(name)
    problems: list[str] = []
    for text, names in said.items():  # of all rows, or of some
        is_of_all = len(names) == len(command_lines)
        problems += [text] if is_of_all else [f"{each}: {text}" for each in names]
    if rows and not problems and not rows[0].run.only_renders:
        problems += problems_of_room(rows)
    return rows, problems


def problems_of_room(rows: Sequence[NamedRun]) -> list[str]:
    """Return why the cluster would not take all jobs at once, unless they may follow in waves."""
    run = rows[0].run
    room = run.launcher.room()
    count = sum(len(each.run.jobs) for each in rows)
    if room is None or count <= room.free or run.config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits them in waves."]


def run_rows(rows: Sequence[NamedRun], console: Console, *, wait: bool) -> int:
    """Run the rows, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them, with `wait` as soon as
    it has room, and then they are followed one after another. A row that fails does not stop the
    others.
    """
    try:
        if not rows[0].run.launcher.in_foreground:
            _submit_all(rows, console, wait=wait)
        for number, each in enumerate(rows, start=1):
            if each.status is None or (each.status == EXIT_OK and wait):
                console.say(f"\n[{number}/{len(rows)}] {each.name}")
                each.status = each.run.run_all(wait=wait)
            if each.status == EXIT_INTERRUPTED:
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((each.status for each in rows if each.status), EXIT_OK)


def _submit_all(rows: Sequence[NamedRun], console: Console, *, wait: bool) -> None:
    """Put rows into the queue; with `wait` each once there is room for its jobs."""
    for number, each in enumerate(rows):
        if wait:
            _wait_for_room(each.run, [earlier.run for earlier in rows[:number]])
        console.say(f"\n[{number + 1}/{len(rows)}] {each.name}")
        each.status = each.run.submit_all()


def _wait_for_room(run: Run, earlier: Sequence[Run]) -> None:
    """Wait until the queue takes the jobs of a run, or nothing of this command is left in it."""
    deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
    while (room := run.launcher.room()) is not None and room.free < len(run.jobs):
        if not all(each.has_ended() for each in earlier):
            deadline = time.monotonic() + _ROOM_WAIT_S
        elif time.monotonic() > deadline:
            return
        time.sleep(_ROOM_POLL_S)
