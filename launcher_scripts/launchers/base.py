"""The interface to a cluster: jobs, their handles, launchers and queue slots."""

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from foundations.files.json_content import Table
from launcher_scripts.configuration.schema import Config
from launcher_scripts.configuration.settings import CHECKOUT
from stages.base import Stage
from stages.job_process import OWNER_VARIABLE
from stages.record import RECORD_NAME
from stages.step import JobStep

# Folder of pickles and batch scripts within a job's folder.
SUBMITIT_NAME = "submitit"
# A controller that is busy or fails over may not answer for some minutes.
PATIENCE_S = 300.0
# A command has submitted all its jobs by then, or never will.
SUBMISSION_S = 900.0
# Kinds of dependency, as in `afterok:12`: on another job's success, start or end.
AFTER_SUCCESS, AFTER_START, AFTER_END = "afterok", "after", "afterany"
_READ_CHARS = 1 << 20  # a log may be larger than memory
# Variables of an enclosing job or launcher that would bind our jobs to the wrong resources, and
# those by which a user's profile filters the answers of Slurm's commands.
_FOREIGN_PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMIX_", "PMI_", "OMPI_", "SUBMITIT_",
    "SQUEUE_", "SCANCEL_", "SCONTROL_", "SACCT_", "SACCTMGR_", "SINFO_",
)  # fmt: skip
_FOREIGN_NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", OWNER_VARIABLE,
)  # fmt: skip
# Exceptions: these locate the scheduler, or come from a user's profile for every sbatch.
_KEPT_NAMES = (
    "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SBATCH_ACCOUNT", "SBATCH_CONSTRAINT",
    "SBATCH_PARTITION", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_WCKEY",
)  # fmt: skip


def settings_section(stage: str) -> str:
    """Return the configuration section with a stage's job settings, such as `time_limit`."""
    return "export.run" if stage in ("convert", "export") else stage


class SubmissionError(RuntimeError):
    """The cluster refused a job; the message comes from the scheduler."""


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
        """Name of the job on a cluster, with the configured prefix."""
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
        """Whether the stage reports readiness and then runs until it is stopped."""
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
        """Return the final state of the job, or None until it has ended."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask the job to end, kill it after `grace_s`, and return once it has ended."""


def copy_from(log: Path, position: int, write: Callable[[str], object]) -> int:
    """Write a log, which may not exist yet, from a position to its end; return the new position."""
    if not log.is_file():
        return position
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(position)
        while text := file.read(_READ_CHARS):
            write(text)
        return file.tell()


def dependency(before: Sequence[tuple[Job, str]]) -> str:
    """Return the dependency of a job on the jobs before it, each given with its id.

    The last of them must succeed. If that is a server, it must start, and the job before it must
    succeed as well: if that fails, the server is cancelled, which Slurm counts as a start.
    """
    words: list[str] = []
    for job, job_id in reversed(before):
        words.insert(0, f"{AFTER_START if job.is_server else AFTER_SUCCESS}:{job_id}")
        if not job.is_server:
            break
    return ",".join(words)


@dataclass(frozen=True)
class QueueSlots:
    """Free queue slots of the user, out of the `limit` set by `owner`, an account or a QOS."""

    free: int
    limit: int
    owner: str

    def __str__(self) -> str:
        return (
            f"{self.limit - self.free} of your jobs are queued, and {self.owner} allows "
            f"{self.limit}"
        )


class Launcher(ABC):
    """Submits the jobs of one configuration to one kind of cluster."""

    name: ClassVar[str]
    # Whether jobs run in the foreground and end with this command; if not, they are queued.
    in_foreground: ClassVar[bool] = True
    # Suffix of the name of the file with the text that `render` returns.
    script_name: ClassVar[str] = "submission.sh"
    # Whether it only writes files, which the user submits.
    only_renders: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return every reason why the cluster cannot run these stages."""

    def notes(self, stages: Sequence[Stage]) -> list[str]:
        """Return notes about this cluster to show before the jobs start; none by default."""
        del stages
        return []

    @abstractmethod
    def render(self, job: Job, after: str) -> str:
        """Return the submission script without submitting it; `after` is the job's dependency."""

    def submit(self, job: Job, after: str = "", *, patience_s: float = PATIENCE_S) -> JobHandle:
        """Start or queue a job whose files are already in place.

        Raises:
            SubmissionError: the cluster refuses it, or does not answer within `patience_s`.
        """
        raise NotImplementedError  # never called if `only_renders`

    def queue_slots(self) -> QueueSlots | None:
        """Return how many more jobs the user may queue; None if nothing limits them."""
        return None


def fill(template: str, **values: Any) -> str:
    """Return a rendered template of this folder.

    Its filters `quote` and `words` quote one word or a list of words for a shell.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {"quote": shlex.quote, "words": shlex.join}
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)


def as_options(options: Table) -> list[str]:
    """Return options as command-line words: `--a-name=value`, or `--a-name` for True.

    Options with the value None or False are left out.
    """
    return [
        f"--{name.replace('_', '-')}" + (f"={value}" if value is not True else "")
        for name, value in sorted(options.items())
        if value is not None and value is not False
    ]


def job_script(
    job: Job,
    step: JobStep | None,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the script of a job: variables, setup lines, and `exec` of the job's Python.

    Args:
        job: The job.
        step: The step that the job starts, shown in a comment.
        folder: Folder of the job's pickle.
        flags: Options of sbatch.
        variables: Variables with values in shell syntax, which are not quoted.
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
