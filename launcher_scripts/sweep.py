"""`--multirun key=1,2,4`: one pipeline for each combination of values, and a table at the end.

All combinations are composed and checked before the first starts.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import ValueType

from launcher_scripts.actions import note_last_run
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import hydra_text, read_override
from launcher_scripts.configuration.settings import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.launchers.base import AFTER_TWIN, SubmissionError
from launcher_scripts.run import Run
from stages import record
from stages.progress import write_json

if TYPE_CHECKING:
    from launcher_scripts.launchers.slurm import SlurmLauncher
    from launcher_scripts.launchers.slurm_limits import Room

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
    room = _room(outcomes)
    count = sum(len(each.run.jobs) for each in outcomes)
    if room is None or count <= room.free or outcomes[0].run.config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits them in waves."]


def _room(outcomes: Sequence[Outcome]) -> Room | None:
    from launcher_scripts.launchers.slurm import SlurmLauncher

    launcher = outcomes[0].run.launcher
    return launcher.room() if isinstance(launcher, SlurmLauncher) else None


def _waves(outcomes: Sequence[Outcome]) -> Iterator[Sequence[Outcome]]:
    """Yield as many combinations as the queue takes at a time, until there are none left."""
    while outcomes:
        size, needed = len(outcomes), max(len(each.run.jobs) or 1 for each in outcomes)
        deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
        while (room := _room(outcomes)) is not None:
            size = room.free // needed
            if size > 0 or time.monotonic() > deadline:
                break
            time.sleep(_ROOM_POLL_S)
        size = max(size, 1)
        yield outcomes[:size]
        outcomes = outcomes[size:]


def run_sweep(outcomes: Sequence[Outcome], *, wait: bool, console: Console, folder: Path) -> int:
    """Run the combinations, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them at once, and with `wait`
    they are followed one after another, in waves where it takes no more. A combination that fails
    does not stop the others. `folder` receives the files that the combinations share.
    """
    done = 0
    try:
        for number, wave in enumerate(_waves(outcomes) if wait else [outcomes], start=1):
            own = folder if len(wave) == len(outcomes) else folder / f"wave_{number}"
            _run_wave(wave, done, len(outcomes), wait=wait, console=console, folder=own)
            done += len(wave)
            if any(each.status == EXIT_INTERRUPTED for each in wave):
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((each.status for each in outcomes if each.status), EXIT_OK)


def _run_wave(
    wave: Sequence[Outcome], done: int, total: int, *, wait: bool, console: Console, folder: Path
) -> None:
    """Run combinations that the queue takes together; `done` of `total` came before."""
    queued = [each for each in wave if not each.run.launcher.in_foreground]
    if _submit_as_arrays(queued, folder, console):
        console.say(f"submitted as job arrays; their logs are in {folder}")
    for number, each in enumerate(queued, start=done + 1):
        if each.status is None:
            console.say(f"\n[{number}/{total}] {each.combination.label}")
            each.status = each.run.submit_all()
    for number, each in enumerate(wave, start=done + 1):
        if each.status not in (None, EXIT_OK) or (each in queued and not wait):
            continue
        console.say(f"\n[{number}/{total}] {each.combination.label}")
        each.status = each.run.run_all(wait=wait)
        if each.status == EXIT_INTERRUPTED:
            return


def _submit_as_arrays(outcomes: Sequence[Outcome], folder: Path, console: Console) -> bool:
    """Submit each stage of all combinations as one job array; False where they differ too much.

    Where Slurm takes no array of so many, there are several.
    """
    from launcher_scripts.launchers.slurm import SlurmLauncher

    runs = [each.run for each in outcomes]
    names = [tuple(run.jobs) for run in runs]
    launcher = runs[0].launcher if runs else None
    if not isinstance(launcher, SlurmLauncher) or len(set(names)) != 1 or not names[0]:
        return False
    if not all(launcher.fits_array([run.jobs[name] for run in runs]) for name in names[0]):
        return False
    size = launcher.largest_array()
    parts = [outcomes[first : first + size] for first in range(0, len(outcomes), size)]
    for number, part in enumerate(parts, start=1):
        place = folder if len(parts) == 1 else folder / f"part_{number}"
        _submit_array(launcher, part, names[0], place, console)
    return True


def _submit_array(
    launcher: SlurmLauncher,
    outcomes: Sequence[Outcome],
    names: Sequence[str],
    folder: Path,
    console: Console,
) -> None:
    """Submit an array for each stage; each job waits for its own of the stage before."""
    runs, after = [each.run for each in outcomes], ""
    status = EXIT_OK
    for name in names:
        announced = []
        try:
            for run in runs:
                run.announce(name, after)
                announced.append(run)
            handles = launcher.submit_array([run.jobs[name] for run in runs], after, folder / name)
        except SubmissionError as error:
            console.say(f"a job array was refused: {error}")
            for run in announced:
                run.note_refusal(name, error)
            for run in runs:
                run.stop_all()
            status = EXIT_FAILED
            break
        for run, handle in zip(runs, handles, strict=True):
            run.note_submission(name, handle)
        after = f"{AFTER_TWIN}:{handles[0].job_id.partition('_')[0]}"
    for outcome in outcomes:
        outcome.status = status


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
