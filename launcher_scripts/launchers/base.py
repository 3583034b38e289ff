"""The interfaces to a cluster: jobs, their handles, launchers and queues."""

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import CHECKOUT
from stages.base import Stage
from stages.record import RECORD_NAME
from stages.step import JobStep

# Folder of pickles and batch scripts, within that of a job.
SUBMITIT_NAME = "submitit"
# A busy controller, or one that fails over, may not answer for some minutes.
PATIENCE_S = 300.0
# All jobs of a command are in the queue by then, or never will be.
SUBMISSION_S = 900.0
# Kinds of dependency, as in `afterok:12`: on the success of another job, or on its start or end.
AFTER_SUCCESS, AFTER_START, AFTER_END = "afterok", "after", "afterany"
# Variables of an enclosing job or launcher, which would bind our jobs to the wrong resources.
_FOREIGN_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMIX_", "PMI_", "OMPI_", "SUBMITIT_",
)  # fmt: skip
_FOREIGN_NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)  # fmt: skip
# Exceptions: they locate the scheduler, or are a profile's for every sbatch.
_KEPT_NAMES = (
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SBATCH_ACCOUNT", "SBATCH_CONSTRAINT",
    "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY",
)  # fmt: skip


def settings_section(stage: str) -> str:
    """Return the section with `name` and `time_limit` of a stage's job."""
    return "export.run" if stage in ("convert", "export") else stage


class SubmissionError(RuntimeError):
    """The cluster refused a job; the message is the scheduler's."""


@dataclass(frozen=True)
class Job:
    """A stage that is ready to be submitted, with the configuration of its run."""

    stage: Stage
    config: Config
    git_revision: str = ""

    @property
    def name(self) -> str:
        """Name of the job without the cluster's prefix."""
        return self.stage.job.name

    @property
    def full_name(self) -> str:
        """Name of the job on a cluster, whose users may share a queue."""
        return self.config.cluster.job_name_prefix + self.name

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the job."""
        variables = self.config.env_vars.items()
        return {name: str(value) for name, value in variables if value is not None}

    @property
    def folder(self) -> Path:
        """Folder of the job's files."""
        return self.stage.job.folder

    @property
    def is_server(self) -> bool:
        """Whether the stage is ready long before it ends."""
        return self.stage.readiness_path() is not None

    @property
    def submitit_folder(self) -> Path:
        """Folder of submitit's pickles."""
        return self.folder / SUBMITIT_NAME

    @property
    def record_path(self) -> Path:
        """Path of the job's record."""
        return self.folder / RECORD_NAME


@dataclass
class JobHandle(ABC):
    """A submitted job; `log_path` receives its output."""

    job: Job
    job_id: str
    log_path: Path

    @abstractmethod
    def poll(self) -> str | None:
        """Return the final state, or None while the job has not ended."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask the job to end, then kill it; return when none of its processes is left."""


def dependency(before: Sequence[tuple[Job, str]]) -> str:
    """Return the dependency of a job on those before it, given with their ids.

    The last one has to succeed. A server has to start, and the one before it to succeed: Slurm
    takes `after` for satisfied also when a job is cancelled, as it is when that one has failed.
    """
    words: list[str] = []
    for job, job_id in reversed(before):
        words.insert(0, f"{AFTER_START if job.is_server else AFTER_SUCCESS}:{job_id}")
        if not job.is_server:
            break
    return ",".join(words)


@dataclass(frozen=True)
class Room:
    """The jobs that `owner`, an account or a QOS, still takes into the queue, of `most`."""

    free: int
    most: int
    owner: str

    def __str__(self) -> str:
        return (
            f"{self.most - self.free} of your jobs are in the queue, and {self.owner} lets you "
            f"have {self.most} there"
        )


class Launcher(ABC):
    """Submits jobs to one kind of cluster, of one configuration."""

    name: ClassVar[str]
    # Whether jobs are part of this command and end with it; otherwise they are queued.
    in_foreground: ClassVar[bool] = True
    # End of the name of the file that `render` fills.
    script_name: ClassVar[str] = "submission.sh"
    # Whether files are all that it makes: the user starts what they describe.
    only_renders: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return every reason why the cluster cannot run these stages."""

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return remarks about this cluster, shown before the jobs start; most have none."""
        del stages
        return []

    @abstractmethod
    def render(self, job: Job, after: str) -> str:
        """Return the submission script without submitting it; `after` is the job's dependency."""

    def submit(self, job: Job, after: str = "", *, patience_s: float = PATIENCE_S) -> JobHandle:
        """Start or queue a job whose files are already in place.

        Raises:
            SubmissionError: the cluster refuses it, or does not answer for so long.
        """
        raise NotImplementedError  # where only files are made

    def room(self) -> Room | None:
        """Return how many jobs more the user may have in the queue; None for any number."""
        return None


def fill(template: str, **values: Any) -> str:
    """Return a template of this folder with values, quoted for a shell by `quote` and `words`."""
    made = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    made.filters |= {"quote": shlex.quote, "words": shlex.join}
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return made.from_string(text).render(values)


def job_script(
    job: Job,
    step: JobStep | None,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the script of a job: variables, setup, and the job's Python in place of bash.

    Args:
        job: The job.
        step: What it will start.
        folder: With its pickle.
        flags: Options of sbatch.
        variables: Values in the shell's own notation.
    """
    shown = "" if step is None else shlex.join(step.command("STAGE", "RESULT"))
    return fill(
        "job.sh.j2",
        flags=flags,
        environment=job.environment,
        variables=variables or {},
        folder=str(folder),
        checkout=str(CHECKOUT),
        setup=job.config.cluster.setup,
        step=shown.replace("\n", "\\n"),
        python=sys.executable,
    )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of an enclosing job."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_NAMES or not (name.startswith(_FOREIGN_PREFIXES) or name in _FOREIGN_NAMES)
    }
