"""`--multirun key=1,2,4`: one pipeline for each combination of values, and a table at the end.

All combinations are composed and checked before the first starts.
"""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ValueType

from launcher_scripts.actions import note_last_run
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import hydra_text, read_override
from launcher_scripts.configuration.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import AFTER_TWIN, SubmissionError
from launcher_scripts.run import Run, submit_jobs
from stages import record
from stages.progress import write_json

SUMMARY_NAME = "sweep.json"
_ROOM_WAIT_S, _ROOM_POLL_S = 60.0, 2.0
_RESULTS_KEY = "export.run.results_dir"
_WORST_FIRST = (
    *(record.FAILED, record.LOST, record.CANCELLED, record.RUNNING),
    *(record.READY, record.SUBMITTED, record.COMPLETED),
)


@dataclass(frozen=True)
class Combination:
    """One value for every key that is swept.

    Attributes:
        values: value of each key, as on the command line.
        overrides: the whole command line with them.
    """

    values: Mapping[str, str]
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """`key=value` of each key, by the last part of its name."""
        return ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())

    @property
    def folder_name(self) -> str:
        """The label as a file name."""
        return re.sub(r"[^\w.]+", "-", self.label)


@dataclass
class Outcome:
    """A combination, its run, and the exit status of that."""

    combination: Combination
    run: Run
    status: int | None = None

    def result(self) -> dict[str, Any]:
        """Return what the records say, for programs."""
        known = [each for each in self.run.records().values() if each is not None]
        results = self.run.results().values()
        # The worst state of the jobs.
        states = [state for state in _WORST_FIRST if state in {each.state for each in known}]
        if not known:
            none = {None: "not started", EXIT_OK: "finished earlier"}
            states = [none.get(self.status, record.FAILED)]
        return {
            "values": dict(self.combination.values),
            "results_dir": str(self.run.config.results_dir),
            "state": states[0],
            "exit_status": self.status,
            "seconds": sum(each.seconds or 0.0 for each in known) or None,
            "metrics": {k: v for each in results for k, v in each.get("metrics", {}).items()},
        }


def combinations(overrides: Sequence[str]) -> tuple[list[Combination], list[str]]:
    """Return every combination of the listed values, and the problems of unbounded lists."""
    swept: dict[str, list[str]] = {}
    fixed: list[str] = []
    problems = []
    for each in overrides:
        try:
            parsed = read_override(each)
        except ValueError:
            fixed.append(each)  # composing reports it
            continue
        if not parsed.is_sweep_override():
            fixed.append(each)
        elif parsed.is_discrete_sweep() and parsed.value_type is not ValueType.GLOB_CHOICE_SWEEP:
            swept[parsed.get_key_element()] = list(dict.fromkeys(parsed.sweep_string_iterator()))
        else:
            problems.append(f"{each}: list the values, as in {parsed.key_or_group}=1,2,4.")
    chosen = [dict(zip(swept, each, strict=True)) for each in itertools.product(*swept.values())]
    return [
        Combination(values, (*fixed, *(f"{key}={value}" for key, value in values.items())))
        for values in chosen
    ], problems


def compose_all(
    wanted: Sequence[Combination], compose: Callable[[Sequence[str]], Composition]
) -> list[Composition]:
    """Compose every combination; those that share a results folder get one each inside it."""
    composed = [compose(each.overrides) for each in wanted]
    folders = Counter(_results_of(each) for each in composed)
    names = Counter(each.folder_name for each in wanted)
    found = []
    for number, (each, composition) in enumerate(zip(wanted, composed, strict=True), start=1):
        folder, name = _results_of(composition), each.folder_name
        if folder is not None and folders[folder] > 1:
            name = name if names[name] == 1 else f"{name}-{number}"  # such as those of +1 and -1
            own = f"{_RESULTS_KEY}={hydra_text(f'{folder}/{name}')}"
            composition = compose([*each.overrides, own])
        found.append(composition)
    return found


def _results_of(composition: Composition) -> str | None:
    return composition.config.export.run.results_dir if composition.config else None


def run_and_compare(outcomes: Sequence[Outcome], console: Console) -> int:
    """Run the combinations, show and save their comparison; return the first bad exit status."""
    config = outcomes[0].run.config
    base = Path(config.base_results_dir)
    note_last_run(base, *(each.run.config.results_dir for each in outcomes))
    folder = base / f"sweep_{datetime.now():%m%d_%H%M%S}"
    status = run_sweep(outcomes, wait=config.wait, console=console, folder=folder)
    results = [each.result() for each in outcomes]
    console.say(comparison(results, console))
    path = base / SUMMARY_NAME
    write_json(path, {"at": record.now(), "combinations": results})
    console.say(f"comparison: {path}")
    return status


def problems_of_room(outcomes: Sequence[Outcome]) -> list[str]:
    """Return why the cluster would not take all jobs at once, unless they may follow in waves."""
    run = outcomes[0].run
    room = run.launcher.room()
    count = sum(len(each.run.jobs) for each in outcomes)
    if room is None or count <= room.free or run.config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits them in waves."]


def run_sweep(outcomes: Sequence[Outcome], *, wait: bool, console: Console, folder: Path) -> int:
    """Run the combinations, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them, with `wait` as soon as
    it has room, and then they are followed one after another. A combination that fails does not
    stop the others. `folder` receives the files that the combinations share.
    """
    try:
        if not outcomes[0].run.launcher.in_foreground:
            _submit_all(outcomes, wait=wait, console=console, folder=folder)
        for number, each in enumerate(outcomes, start=1):
            if each.status is None or (each.status == EXIT_OK and wait):
                console.say(f"\n[{number}/{len(outcomes)}] {each.combination.label}")
                each.status = each.run.run_all(wait=wait)
            if each.status == EXIT_INTERRUPTED:
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((each.status for each in outcomes if each.status), EXIT_OK)


def _submit_all(outcomes: Sequence[Outcome], *, wait: bool, console: Console, folder: Path) -> None:
    """Put combinations into the queue, as many at a time as one array holds and there is room for.

    Those that fit no array are submitted one by one.
    """
    done = 0
    while done < len(outcomes):
        part = outcomes[done : done + _size(outcomes, done, wait=wait)]
        place = folder if len(part) == len(outcomes) else folder / f"from_{done + 1}"
        if _submit_as_arrays(part, place, console):
            console.say(f"submitted as job arrays; their logs are in {place}")
        for number, each in enumerate(part, start=done + 1):
            if each.status is None:
                console.say(f"\n[{number}/{len(outcomes)}] {each.combination.label}")
                each.status = each.run.submit_all()
        done += len(part)


def _size(outcomes: Sequence[Outcome], done: int, *, wait: bool) -> int:
    """Return how many of the combinations after the first `done` the queue takes together."""
    launcher = outcomes[0].run.launcher
    needed = max(len(each.run.jobs) or 1 for each in outcomes[done:])
    deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
    while wait and (room := launcher.room()) is not None:
        if room.free >= needed or time.monotonic() > deadline:
            return max(min(room.free // needed, launcher.largest_array()), 1)
        if not all(each.run.has_ended() for each in outcomes[:done]):
            deadline = time.monotonic() + _ROOM_WAIT_S
        time.sleep(_ROOM_POLL_S)
    return launcher.largest_array()


def _submit_as_arrays(outcomes: Sequence[Outcome], folder: Path, console: Console) -> bool:
    """Submit each stage of all combinations as one job array; False where they differ too much.

    Each job waits for its own of the stage before.
    """
    runs, after, status = [each.run for each in outcomes], "", EXIT_OK
    names, launcher = list(runs[0].jobs), runs[0].launcher
    is_alike = names and all(list(run.jobs) == names for run in runs)
    if not is_alike or not all(launcher.fits_array([run.jobs[n] for run in runs]) for n in names):
        return False
    try:
        for name in names:
            first, *_ = submit_jobs(runs, name, after, folder / name)
            after = f"{AFTER_TWIN}:{first.job_id.partition('_')[0]}"
    except SubmissionError as error:
        console.say(f"a job array was refused: {error}")
        for run in runs:
            run.stop_all()
        status = EXIT_FAILED
    for outcome in outcomes:
        outcome.status = status
    return True


def comparison(results: Sequence[Mapping[str, Any]], console: Console) -> str:
    """Return the table that compares the results of the combinations."""
    names = list(dict.fromkeys(name for each in results for name in each["metrics"]))
    rows = [
        (
            *each["values"].values(),
            each["state"],
            "-" if each["seconds"] is None else f"{each['seconds']:.1f}",
            *(
                f"{each['metrics'][name] + 0.0:.4g}" if name in each["metrics"] else "-"
                for name in names
            ),
            each["results_dir"],
        )
        for each in results
    ]
    keys = (key.rpartition(".")[2] for key in results[0]["values"])
    return "\n" + console.table((*keys, "state", "seconds", *names, "results"), rows)
