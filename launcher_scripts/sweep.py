"""`--multirun key=1,2,4`: one pipeline for each combination of values, and a table at the end.

All combinations are composed and checked before the first starts.
"""

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ValueType

from launcher_scripts.actions import note_last_run
from launcher_scripts.configuration.compose import Composition
from launcher_scripts.configuration.diagnosis import hydra_text, read_override
from launcher_scripts.configuration.settings import EXIT_INTERRUPTED, EXIT_OK
from launcher_scripts.console import Console
from launcher_scripts.run import Run
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
    status = run_sweep(outcomes, wait=config.wait, console=console)
    results = [each.result() for each in outcomes]
    console.say(comparison(results, console))
    path = base / SUMMARY_NAME
    write_json(path, {"at": record.now(), "combinations": results})
    console.say(f"comparison: {path}")
    return status


def problems_of_room(outcomes: Sequence[Outcome]) -> list[str]:
    """Return why the cluster would not take all jobs at once, unless they may wait."""
    run = outcomes[0].run
    room = run.launcher.room()
    count = sum(len(each.run.jobs) for each in outcomes)
    if room is None or count <= room.free or run.config.wait:
        return []
    return [f"the run has {count} jobs, {room}; wait=true submits each chain once there is room."]


def run_sweep(outcomes: Sequence[Outcome], *, wait: bool, console: Console) -> int:
    """Run the combinations, or put them into the queue; return the first bad exit status.

    In the foreground they run one after another. A queue gets all of them, with `wait` as soon as
    it has room, and then they are followed one after another. A combination that fails does not
    stop the others.
    """
    numbered = enumerate((each.combination.label for each in outcomes), start=1)
    titles = [f"\n[{number}/{len(outcomes)}] {label}" for number, label in numbered]
    try:
        for number, each in enumerate(outcomes):
            if not each.run.launcher.in_foreground:
                if wait:
                    _await_room(each.run, [other.run for other in outcomes[:number]])
                console.say(titles[number])
                each.status = each.run.submit_all()
        for each, title in zip(outcomes, titles, strict=True):
            if each.status is None or (each.status == EXIT_OK and wait):
                console.say(title)
                each.status = each.run.run_all(wait=wait)
            if each.status == EXIT_INTERRUPTED:
                break
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return next((each.status for each in outcomes if each.status), EXIT_OK)


def _await_room(run: Run, before: Sequence[Run]) -> None:
    """Wait until the queue takes the jobs of a run, as long as jobs of those before it may end."""
    deadline = time.monotonic() + _ROOM_WAIT_S  # a job that has ended leaves the queue later
    while (room := run.launcher.room()) is not None and room.free < len(run.jobs):
        if not all(each.has_ended() for each in before):
            deadline = time.monotonic() + _ROOM_WAIT_S
        elif time.monotonic() > deadline:
            return
        time.sleep(_ROOM_POLL_S)


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
