"""A submitit executor for Base Command Platform: `submitit.AutoExecutor(folder, cluster="bcp")`.

A Base Command job is a set of replicas without a scheduler. Submission starts one process per task
at once, in the foreground, with bcprun, or with mpirun where bcprun is missing. The process of each
task reads its rank from its environment and runs the same pickled callable.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from submitit.core import core, plugins, submission
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.local.local import LocalJob

from inference.system.launch_environment import LAUNCHER_VARIABLE, read_launch_environment
from inference.system.parent_process import end_with_parent
from launcher_scripts.configuration.settings import CHECKOUT
from launcher_scripts.launchers.base import fill

ID_VARIABLE = "SUBMITIT_BCP_JOB_ID"
MPIRUN = "mpirun"
_AS_ROOT = ("--allow-run-as-root",)
# Between SIGTERM and SIGKILL.
_KILL_AFTER_S = 90
# Variables that a process of bcprun does not inherit. Secrets are listed by name only: no script
# contains their values.
_PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "SUBMITIT_EXECUTOR",
    ID_VARIABLE, "HF_TOKEN", "NGC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
)  # fmt: skip
# Property of submitit's environment of a task -> the variable that it is read from.
_PLACE = {
    name: f"SUBMITIT_BCP_{name.upper()}"
    for name in ("num_tasks", "num_nodes", "node", "global_rank", "local_rank")
}
# Exit status of `timeout`, for a job that its time limit has ended.
TIMED_OUT = 124


class BcpJob(LocalJob[Any]):
    """Tasks that run on the replicas of this Base Command job."""

    watcher = core.InfoWatcher()  # the base class shares one among all clusters

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The program that starts the tasks, and ends after all of them."""
        assert self._process is not None
        return self._process

    def cancel(self, check: bool = True) -> None:
        """Ask every task to end."""
        del check
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)


class BcpJobEnvironment(JobEnvironment):
    """The place of a task among the tasks, from the variables that `main` sets."""

    _env = {"job_id": ID_VARIABLE, **_PLACE}  # noqa: RUF012 - submitit declares it so

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Install no signal handlers: nothing is requeued here, and a signal ends a task."""
        del paths, submission


class BcpExecutor(core.PicklingExecutor):
    """Runs callables on the replicas of the Base Command job that this process is part of."""

    job_class = BcpJob

    def __init__(
        self,
        folder: Path | str,
        max_num_timeout: int = 0,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
        bcprun: str = "bcprun",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self.python = python or sys.executable
        self.environment = dict(os.environ if environment is None else environment)
        self.bcprun = bcprun
        self.parameters |= {"nodes": 1, "tasks_per_node": 1}

    @classmethod
    def affinity(cls) -> int:
        """Return 3, above Slurm, inside a Base Command job, and -1 elsewhere."""
        return 3 if "NGC_JOB_ID" in os.environ and runner() is not None else -1

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"job_id", "log_path", "exports", "no_redirect", "setup", "arguments"}

    def _num_tasks(self) -> int:
        return int(self.parameters["nodes"] * self.parameters["tasks_per_node"])

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([self.python, "-u", "-m", __name__, str(self.folder)])

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """Return the script that runs the shell line of one task as each of them.

        bash is replaced by the runner, whose status is the job's. Of the parameters, `exports` are
        variables of every task, `setup` shell lines that run before, `arguments` further ones of
        bcprun.
        """
        program = runner(self.bcprun, self.environment) or self.bcprun
        parameters, by_mpirun = self.parameters, Path(program).name == MPIRUN
        exports, per_node = parameters.get("exports", {}), str(parameters["tasks_per_node"])
        if by_mpirun:
            words = [*_AS_ROOT, "-np", str(self._num_tasks()), "-npernode", per_node]
            words += ["-x", f"{LAUNCHER_VARIABLE}=mpirun"]
        else:
            words = ["--nnodes", str(parameters["nodes"]), "--npernode", per_node]
            if self.environment.get("NGC_ARRAY_TYPE", "").upper().startswith("MPI"):
                words += ["--launcher", shlex.join([MPIRUN, *_AS_ROOT])]
            words += ["-no_redirect"] * parameters.get("no_redirect", True)
            words += ["--workdir", str(CHECKOUT), *parameters.get("arguments", ())]
        minutes = parameters.get("timeout_min")
        # `--foreground`: the signal goes to the runner alone, which passes it on to the tasks.
        limit = ["timeout", "--foreground", f"--kill-after={_KILL_AFTER_S}", f"{minutes}m"]
        return fill(
            "bcp.sh.j2",
            environment=exports,
            id_variable=ID_VARIABLE,
            job_id=uid,
            checkout=str(CHECKOUT),
            setup=parameters.get("setup", ()),
            handed_on=dict.fromkeys([*_PASSED_ON, *exports]),
            by_mpirun=by_mpirun,
            limit=[] if minutes is None else limit,
            runner=[program, *words],
            task=[*(["bash", "-c"] if by_mpirun else ["--cmd"]), command],
        )

    def _submit_command(self, command: str) -> BcpJob:
        """Start the tasks at once, under an id of our own."""
        parameters = self.parameters
        if runner(self.bcprun, self.environment) is None:
            raise RuntimeError(f"neither {self.bcprun} nor {MPIRUN} is on PATH")
        own_id = f"{datetime.now():%m%d_%H%M%S}_{uuid.uuid4().hex[:6]}"
        job_id = parameters.get("job_id") or own_id
        text = self._make_submission_file_text(command, job_id)
        paths = JobPaths(self.folder, job_id)
        self.folder.mkdir(parents=True, exist_ok=True)
        paths.submission_file.write_text(text, encoding="utf-8")
        log_path = Path(parameters.get("log_path", paths.stdout))
        # For the kernel the parent is a thread, which may end long before the process.
        is_main = threading.current_thread() is threading.main_thread()
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                self._make_submission_command(paths.submission_file),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM) if is_main else None,
            )
        return BcpJob(self.folder, job_id, list(range(self._num_tasks())), process)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["bash", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError  # ids are our own


def runner(bcprun: str = "bcprun", environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the program that starts processes on the replicas, or None."""
    path = environment.get("PATH", "")
    return next((each for each in (bcprun, MPIRUN) if shutil.which(each, path=path)), None)


def main(folder: Path) -> None:
    """Run one task; this project need not be installed, PYTHONPATH is enough."""
    place = read_launch_environment(os.environ)
    size, local_size = place.world_size, place.local_size
    values = (size, -(-size // local_size), place.rank // local_size, place.rank, place.local_rank)
    os.environ |= dict(zip(_PLACE.values(), map(str, values), strict=True))
    known = plugins.get_job_environments()
    if BcpJobEnvironment.name() not in known:
        # Registered in submitit's own table: entry points exist only for installed packages.
        plugins._get_plugins()[1].append(BcpJobEnvironment())
        plugins.get_job_environments.cache_clear()
    submission.process_job(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
