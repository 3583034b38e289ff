"""The state of a watch, in a file that a watch started later continues from."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from inference.evaluation.task import Metric
from launcher_scripts.trained_checkpoints import TrainedCheckpoint
from stages.progress import DamagedFileError, read_json, write_json

STATE_NAME = "watch.json"

# States of a checkpoint, in the order of its life; the last four are final.
WAITING, RUNNING = "waiting", "running"
EVALUATED, FAILED, PASSED_OVER, GONE = "evaluated", "failed", "passed over", "gone"
FINAL_STATES = (EVALUATED, FAILED, PASSED_OVER, GONE)


@dataclass
class Watched:
    """A checkpoint that a watch has seen.

    Attributes:
        path, name: as in `TrainedCheckpoint`.
        changed: when its files last changed, as far as the watch has seen, in seconds of the epoch.
        size: its files as the watch last saw them, in a form that any change alters.
        attempts: how often its pipeline was started.
        problem: what it waits for, or why it failed.
        refusal: why its pipeline could not start with its files as they are.
        results_dir: folder of its pipeline; empty before the first start.
        repository: folder of shards and repository that the pipeline made, until it is deleted.
        jobs: stages that were submitted.
        metrics: those of its report, by name.
        verdict: the comparison with the best checkpoint before it.
    """

    step: int
    path: str
    name: str | None = None
    state: str = WAITING
    changed: float = 0.0
    size: str = ""
    attempts: int = 0
    problem: str = ""
    refusal: str = ""
    results_dir: str = ""
    repository: str = ""
    jobs: list[str] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    report: str = ""
    verdict: str = ""

    @property
    def is_final(self) -> bool:
        """Return whether nothing more happens with it."""
        return self.state in FINAL_STATES

    @property
    def checkpoint(self) -> TrainedCheckpoint:
        """The checkpoint, as it was found."""
        return TrainedCheckpoint(self.step, Path(self.path), self.name)


@dataclass
class WatchState:
    """All checkpoints that a watch has seen, by step, and the best of them."""

    run: str
    watched: dict[int, Watched] = field(default_factory=dict)
    best: int | None = None

    @property
    def in_order(self) -> list[Watched]:
        """The checkpoints in the order of their steps."""
        return [self.watched[step] for step in sorted(self.watched)]

    @property
    def the_best(self) -> Watched | None:
        """The best checkpoint so far."""
        return None if self.best is None else self.watched[self.best]


def read_state(folder: Path, run: Path) -> WatchState:
    """Return the state that a watch left in `folder`, or an empty one.

    Raises:
        DamagedFileError: the file does not hold a state.
        ValueError: another training run was watched there.
    """
    path = folder / STATE_NAME
    values = read_json(path)
    if values is None:
        return WatchState(str(run))
    known = {each.name for each in fields(Watched)}
    try:
        found = WatchState(
            str(values["run"]),
            {
                int(each["step"]): _watched({k: v for k, v in each.items() if k in known})
                for each in values["watched"]
            },
            values["best"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(path, "it does not hold the state of a watch") from error
    if found.run != str(run):
        raise ValueError(
            f"watch.output_dir={folder} holds the watch of {found.run}, not of {run}; choose "
            "another folder."
        )
    return found


def _watched(values: dict[str, Any]) -> Watched:
    # Earlier watches kept only value, interval and direction.
    metrics = {
        name: Metric(**{"name": name, "key": name, "stderr": 0.0, "count": 0, "unit": "", **each})
        for name, each in values.pop("metrics").items()
    }
    return Watched(**values, metrics=metrics)


def write_state(folder: Path, state: WatchState) -> None:
    """Replace the state in `folder`."""
    watched = [asdict(each) for each in state.in_order]
    write_json(folder / STATE_NAME, {"run": state.run, "best": state.best, "watched": watched})
