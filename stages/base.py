"""Base class of the stages: a picklable callable with plain data, inputs and outputs.

A stage does not know where it runs. Its finished outputs are recognised by a marker, saved next to
them: the part of the configuration that decides them, and the state of its inputs.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from submitit.helpers import Checkpointable

from foundations.files.json_content import Fields, Table
from foundations.files.tree import files_below
from foundations.values import shown
from inference.system.launch_environment import LaunchEnvironment
from stages.progress import PROGRESS_NAME, Progress, read_as, write_json
from stages.record import now

Summary = Fields


@dataclass(frozen=True)
class Resources:
    """The resources that a job requests. None leaves the choice to the cluster.

    Attributes:
        time_limit_min: the job is ended after this many minutes.
        mem_gb: memory per node.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    time_limit_min: int = 120

    @property
    def time_limit(self) -> str:
        """The time limit in words, for messages."""
        return f"{self.time_limit_min} minute{'' if self.time_limit_min == 1 else 's'}"


@dataclass(frozen=True)
class JobSettings:
    """Settings of a stage's job, the same for every stage.

    Attributes:
        folder: folder of the job's logs, record and progress.
        overwrite: replace outputs of another configuration.
        warning_s: a server stops this long before the job's time limit, ahead of the scheduler's
            own warning.
    """

    name: str
    folder: Path
    resources: Resources = Resources()
    overwrite: bool = False
    warning_s: float = 45.0

    @property
    def progress_path(self) -> Path:
        """Path of the job's progress file."""
        return self.folder / PROGRESS_NAME


@dataclass(frozen=True, kw_only=True)
class Marker:
    """The marker of finished work: a stage is skipped if its configuration and inputs match it."""

    stage: str = ""
    finished_at: str
    identity: Fields
    inputs: Fields
    outputs: tuple[str, ...] = ()
    summary: Summary


@dataclass(frozen=True)
class Finding:
    """The state of a stage's outputs on disk, compared with its configuration.

    Attributes:
        marker: marker of the finished work; None if the work has to be done.
        problems: why the existing outputs must not be replaced.
        changes: why finished work has to be done again.
    """

    marker: Marker | None = None
    problems: Sequence[str] = ()
    changes: Sequence[str] = ()


class StageError(RuntimeError):
    """A stage failed for a reason that a user can act on; shown without a traceback.

    `exit_code` becomes the exit status of the command; `summary` describes what was done
    despite the failure.
    """

    def __init__(self, message: str, *, summary: Summary | None = None, exit_code: int = 1) -> None:
        super().__init__(message)
        self.summary: Summary = summary or {}
        self.exit_code = exit_code


@dataclass(eq=False)
class Stage(Checkpointable):
    """Base class of the stages. Subclasses declare inputs and outputs, and work in `run`."""

    name: ClassVar[str]
    # Whether outputs of another configuration, or of inputs that have since changed, are a problem;
    # if not, they are made again.
    guards_configuration: ClassVar[bool] = True
    guards_inputs: ClassVar[bool] = False
    # Whether complete outputs without a marker, made by other means, are used.
    accepts_unmarked: ClassVar[bool] = False

    job: JobSettings

    def check(self) -> Iterable[str]:
        """Return every problem that can be found before the job starts."""
        raise NotImplementedError

    def missing_now(self) -> list[str]:
        """Return what the job needs and is missing now; a dry run does not check this."""
        return []

    def outputs(self) -> list[Path]:
        """Return the paths that exist once the stage has succeeded."""
        return []

    def identity(self) -> Fields:
        """Return the configuration that decides the outputs: keys with values as in JSON."""
        return {}

    def inputs(self) -> list[Path]:
        """Return the files and folders that the outputs are made from."""
        return []

    def marker_path(self) -> Path | None:
        """Return the path of the marker; None for a stage without outputs."""
        return None

    def readiness_path(self) -> Path | None:
        """Return the file that a server writes once it is ready; None for a stage that ends."""
        return None

    @property
    def is_chained(self) -> bool:
        """Whether a chain of jobs runs the stage, which outlives the time limit of one job."""
        return False

    def ask_to_stop(self) -> bool:
        """Ask the running stage, possibly on another node, to end; False if that is impossible."""
        return False

    def other_logs(self, job_id: str) -> list[Path]:
        """Return further logs that may explain a failure; they need not exist."""
        del job_id
        return []

    def stop_grace_s(self) -> float:
        """Return how long the job may take to shut down, in seconds."""
        return 15.0

    def run(self, progress: Progress) -> Summary:
        """Do the work and return a summary of the result."""
        raise NotImplementedError

    def assist(self, place: LaunchEnvironment) -> None:
        """Do the part of a process other than the first, in a job of several processes.

        The first process calls the stage itself. This returns when the part is done; most stages
        have none.
        """
        del place

    def damage(self) -> list[str]:
        """Return the problems of outputs that should be complete."""
        return []

    def notes(self) -> Iterable[str]:
        """Return notes to show before the job starts, such as a path that was chosen."""
        return []

    def finding(self) -> Finding:
        """Compare the outputs on disk with the configuration."""
        path = self.marker_path()
        marker = None if path is None else read_as(path, Marker, "the marker of finished work")
        if marker is None or not all(output.exists() for output in self.outputs()):
            return Finding()
        settings = [
            f"{key}={shown(mine)} differs from {shown(saved)}, with which"
            for key, mine, saved in _differences(self.identity(), marker.identity)
        ]
        inputs = [
            f"{path} has changed since"
            for path, *_ in _differences(self._input_states(), marker.inputs)
        ]
        if changes := settings or inputs:
            if self.guards_configuration if settings else self.guards_inputs:
                first, *others = self.outputs()
                outputs = f"{first} (with {len(others)} more)" if others else str(first)
                made = f"{outputs} was made; set overwrite=true to make it again, or choose another"
                return Finding(problems=[f"{each} {made} folder." for each in changes])
            return Finding(changes=changes)
        if damage := self.damage():
            return Finding(problems=damage)
        return Finding(marker)

    def __call__(self) -> Summary:
        """Do the work unless it is finished; called again after a requeue."""
        if (marker := self.finding().marker) is not None and not self.job.overwrite:
            return dict(marker.summary)
        progress = self.new_progress()
        progress.update("starting")
        summary = self.run(progress)
        self.mark_finished(summary)
        return summary

    def new_progress(self) -> Progress:
        """Return the object to which the job reports its progress."""
        return Progress(self.job.progress_path)

    def mark_finished(self, summary: Summary) -> None:
        """Save the marker next to the outputs."""
        path = self.marker_path()
        if path is not None:
            marker = Marker(
                stage=self.name,
                finished_at=now(),
                identity=self.identity(),
                inputs=self._input_states(),
                outputs=tuple(map(str, self.outputs())),
                summary=summary,
            )
            write_json(path, marker)

    def _input_states(self) -> Fields:
        return {str(path): fingerprint(path) for path in self.inputs() if path.exists()}


def _differences(mine: Table, saved: Table) -> list[tuple[str, Any, Any]]:
    pairs = [(key, mine.get(key), saved.get(key)) for key in sorted({*mine, *saved})]
    return [pair for pair in pairs if pair[1] != pair[2]]


def fingerprint(path: Path) -> Fields:
    """Return a fingerprint of a file or folder, without reading contents.

    It has the number of files, their total size, and a digest of all names, sizes and modification
    times. The latest time alone would not do: a copy that keeps times may be older than the
    file it replaces.
    """
    files = [path] if path.is_file() else sorted(files_below(path))
    stats = {file.relative_to(path): file.stat() for file in files}
    facts = [f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}" for name, stat in stats.items()]
    return {
        "files": len(files),
        "size_bytes": sum(stat.st_size for stat in stats.values()),
        "sha256": hashlib.sha256("\n".join(facts).encode(errors="surrogateescape")).hexdigest(),
    }
