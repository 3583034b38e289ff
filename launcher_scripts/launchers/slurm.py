"""Jobs on Slurm, through submitit's executor with a batch script of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from launcher_scripts.config import Config
from launcher_scripts.launchers.base import Dependency, Job, SubmissionError, clean_environment
from launcher_scripts.launchers.slurm_script import batch_script, step_of, submitit_folder
from launcher_scripts.launchers.slurm_state import settle
from stages import record
from stages.base import Stage
from stages.job import StageJob

_ASK_S = 20.0
_POLL_S = 2.0


class SlurmLauncher:
    """Submits each job with sbatch; a chain waits by dependencies."""

    name = "bcm"
    in_foreground = False

    def __init__(self, config: Config) -> None:
        self._config = config

    def check(self, stages: Sequence[Stage]) -> list[str]:
        """Return what the cluster would refuse, as far as it can be asked from here."""
        problems = [
            f"{stage.name} needs {stage.resources().nodes} nodes; this version serves on one node: "
            "choose parallel sizes whose product is at most cluster.gpus_per_node="
            f"{self._config.cluster.gpus_per_node}."
            for stage in stages
            if stage.resources().nodes > 1
        ]
        problems += self._problems_of_container()
        if self._config.dry_run:
            return problems
        if shutil.which("sbatch") is None:
            problems.append(
                "cluster_type=bcm needs sbatch, which is not on PATH; run on a login node, or use "
                "cluster_type=local or dry_run=true."
            )
            return problems
        return problems + self._problems_of_partition() + self._problems_of_pyxis()

    def render(self, job: Job, after: Sequence[Dependency]) -> str:
        """Return the batch script; needs no Slurm."""
        return batch_script(job, self._config, after)

    def submit(self, job: Job, after: Sequence[Dependency]) -> SlurmHandle:
        """Put the job into the queue. Raises SubmissionError with the words of sbatch."""
        text = self.render(job, after)
        executor = _Executor(submitit_folder(job), text)
        # submitit counts time-outs with this number; the script says the same.
        executor.update_parameters(time=job.stage.resources().time_limit_min)
        payload = StageJob(job.stage, job.record_path, step_of(job, self._config))
        try:
            with _environment_of_a_login_shell():
                submitted = executor.submit(payload)
        except (FailedJobError, FailedSubmissionError) as error:
            raise SubmissionError(str(error).strip()) from error
        name = f"log-{job.prefix}{job.name}_{submitted.job_id}"
        log_path = job.folder / f"{name}.out"
        record.update_record(job.record_path, submitted.job_id, log=str(log_path))
        return SlurmHandle(job, submitted.job_id, log_path)

    def _problems_of_container(self) -> list[str]:
        image = self._config.container
        if image is None or not image.startswith(("/", "./")) or Path(image).is_file():
            return []
        return [f"container={image} is not a file; give an existing image, or a registry path."]

    def _problems_of_partition(self) -> list[str]:
        partition = self._config.cluster.partition
        if partition is None:
            return []
        known = _answer(["sinfo", "-h", "-o", "%R"])
        names = sorted(set(known.split())) if known else []
        missing = [each for each in partition.split(",") if names and each not in names]
        return [
            f"cluster.partition={partition}: there is no partition {each}; known partitions: "
            f"{', '.join(names)}."
            for each in missing
        ]

    def _problems_of_pyxis(self) -> list[str]:
        if self._config.container is None:
            return []
        described = _answer(["srun", "--help"])
        if described is None or "--container-image" in described:
            return []
        return [
            f"container={self._config.container} needs pyxis, and this Slurm's srun does not know "
            "--container-image; install pyxis, or set container=null."
        ]


class SlurmHandle:
    """A job in Slurm's queue."""

    def __init__(self, job: Job, job_id: str, log_path: Path) -> None:
        self.job = job
        self.job_id = job_id
        self._log_path = log_path
        self._asked_at = 0.0

    @property
    def log_path(self) -> Path:
        """Output of the job; its errors are beside it in .err."""
        return self._log_path

    def poll(self) -> str | None:
        """Return the final state, or None; Slurm is asked at most every few seconds."""
        found = record.read_record(self.job.record_path)
        if found is not None and not found.is_final:
            now = time.monotonic()
            if now - self._asked_at < _POLL_S:
                return None
            self._asked_at = now
            found = settle(self.job.record_path)
        return found.state if found is not None and found.is_final else None

    def stop(self, grace_s: float) -> None:
        """Cancel the job and wait for its end."""
        subprocess.run(["scancel", self.job_id], check=False, timeout=_ASK_S)
        deadline = time.monotonic() + grace_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)


class _Executor(SlurmExecutor):
    """submitit's Slurm executor with a script of ours."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self._script = script

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        del command, uid
        return self._script


@contextmanager
def _environment_of_a_login_shell() -> Iterator[None]:
    """Hide the variables of an enclosing job: sbatch hands all of them on."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(clean_environment(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answer(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
