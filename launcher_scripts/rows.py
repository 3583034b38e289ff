"""The runs of one command: one, the rows of `action=upgrade`, or the combinations of a sweep.

All of them are checked before the first starts.
"""

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.settings import EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.invocation import prepare_run
from launcher_scripts.launchers.slurm_state import queue_now
from launcher_scripts.run import Run

_ROOM_WAIT_S, _ROOM_POLL_S = 60.0, 2.0


def prepare_rows(
    compositions: Mapping[str, Composition], words: Sequence[str], console: Console
) -> tuple[list[Run], list[str]]:
    """Return the runs that have no problem, and the problems of all.

    Args:
        compositions: The configuration of each row by its name.
        words: The command line that the rows were given on.
        console: Receives remarks.
    """
    rows: list[Run] = []
    said: dict[str, list[str]] = {}
    queue = functools.cache(queue_now)
    for name, composition in compositions.items():
        found = list(composition.problems)
        run = prepare_run(composition, words, console, found, name=name, queue=queue)
        if run is not None:
            rows.append(run)
        for text in found:
            said.setdefault(text, []).append(name)
    problems: list[str] = []
    for text, names in said.items():  # of all rows, or of some
        is_of_all = len(names) == len(compositions)
        problems += [text] if is_of_all else [f"{each}: {text}" for each in names]
    if len(rows) > 1 and any(row.config.deploy.keep for row in rows):
        problems.append("deploy.keep=true would keep the first run's server; leave it out.")
    reports = Counter(row.config.evaluate.output_dir for row in rows)
    problems += [
        f"evaluate.output_dir={folder} would hold the reports of {count} runs; leave it out: each "
        "has a folder of its own."
        for folder, count in reports.items()
        if count > 1
    ]
    if rows and not problems and not rows[0].only_renders:
        problems += problems_of_room(rows)
    return rows, problems


def problems_of_room(rows: Sequence[Run]) -> list[str]:
    """Return why the cluster would not take all jobs at once, unless they may wait for it."""
    room = rows[0].launcher.room()
    count = sum(len(row.jobs) for row in rows)
    if room is None or count <= room.free or rows[0].config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits them once there is room."]


def run_rows(rows: Sequence[Run], console: Console, *, wait: bool) -> int:
    """Run the rows, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them, with `wait` as soon as
    it has room, and then they are followed one after another. A row that fails does not stop the
    others.
    """
    heads = [f"\n[{number}/{len(rows)}] {row.name}" for number, row in enumerate(rows, start=1)]
    try:
        if not rows[0].launcher.in_foreground and (wait or len(rows) > 1):
            for number, row in enumerate(rows):
                if wait:
                    _wait_for_room(row, rows[:number])
                if row.name:
                    console.say(heads[number])
                row.status = row.submit_all()
        for head, row in zip(heads, rows, strict=True):
            if row.status is None or (row.status == EXIT_OK and wait):
                if row.name:
                    console.say(head)
                row.status = row.run_all(wait=wait)
            if row.status == EXIT_INTERRUPTED:
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((row.status for row in rows if row.status), EXIT_OK)


def _wait_for_room(run: Run, earlier: Sequence[Run]) -> None:
    """Wait until the queue takes the jobs of a run, or nothing of this command is left in it."""
    deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
    while (room := run.launcher.room()) is not None and room.free < len(run.jobs):
        if not all(each.has_ended() for each in earlier):
            deadline = time.monotonic() + _ROOM_WAIT_S
        elif time.monotonic() > deadline:
            return
        time.sleep(_ROOM_POLL_S)
