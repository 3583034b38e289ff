"""Stage `deploy`: a tritonserver that serves the repository until it is stopped."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from inference.launch_environment import LaunchEnvironment
from stages.base import JobSettings, Stage, StageError, Summary
from stages.deploy_config import FASTERTRANSFORMER, DeployConfig, check_deploy
from stages.endpoint import ENDPOINT_NAME, RELOAD_NAME, STOP_NAME, server_log
from stages.gemm_tuning import tuning_command
from stages.job_process import job_id_here
from stages.progress import Progress
from stages.server_starts import announce_end, rank_command, take_part
from stages.service import Service
from stages.serving import server_environment, server_prefix

# In addition to the time to drain: the models unload.
_UNLOAD_S = 20.0


class DeployStage(Stage):
    """Runs a server and publishes its address once it is ready."""

    name = "deploy"

    def __init__(self, job: JobSettings, config: DeployConfig) -> None:
        super().__init__(job)
        self.config = config

    @property
    def endpoint_path(self) -> Path:
        """The file with the address of the running server."""
        return self.job.folder / ENDPOINT_NAME

    @property
    def stop_path(self) -> Path:
        """The file that asks the server to end."""
        return self.job.folder / STOP_NAME

    def check(self) -> list[str]:
        """Return the problems of engine, ports and times."""
        problems = check_deploy(self.config)
        if self._serving_s() <= 0:
            problems.append(
                f"deploy.time_limit={self.job.resources.time_limit_min} minutes leave no time to "
                f"serve: the last {self.config.drain_s + self.job.warning_s:g} s are for running "
                "requests (deploy.drain_s) and the scheduler's warning; give more."
            )
        return problems

    def _serving_s(self) -> float:
        """Return how long the server may load and serve."""
        limit_s = self.job.resources.time_limit_min * 60
        return limit_s - self.config.drain_s - self.job.warning_s

    def readiness_path(self) -> Path:
        """Return the file that appears once the server is ready."""
        return self.endpoint_path

    def ask_to_stop(self) -> bool:
        """Ask the server to end, through the file that it watches."""
        self.stop_path.touch()
        return True

    def other_logs(self, job_id: str) -> list[Path]:
        """Return the server's log."""
        return [server_log(self.job.folder, job_id)]

    def stop_grace_s(self) -> float:
        """Return the time to drain, plus the time for the models to unload."""
        return self.config.drain_s + _UNLOAD_S

    def notes(self) -> list[str]:
        """Return remarks, and the command of NVIDIA's server to show beforehand."""
        notes = list(self.config.remarks)
        if self.config.max_restarts and not self.config.may_start_again:
            notes.append(
                f"deploy.max_restarts={self.config.max_restarts} has no effect with NVIDIA's "
                "backend over several nodes: its processes can enter MPI once in a job, so a "
                "failure ends the job; start the stage again then"
            )
        if self.config.gemm_tuning.enabled and self.config.weights_dir.exists():
            notes.append(f"deploy measures: {shlex.join(tuning_command(self.config))}")
        if self.config.is_other_engine:
            notes.append(f"deploy starts: {shlex.join(self.config.command_line)}")
        if self.config.engine == FASTERTRANSFORMER:
            notes.append(f"deploy starts: {shlex.join(self.server_command())}")
        return notes

    def server_command(self) -> list[str]:
        """Return the command line of the server of NVIDIA's backend, environment first."""
        from inference.server.options import old_server_options

        config = self.config
        ports = {"http": config.http_port, "grpc": config.grpc_port, "metrics": config.metrics_port}
        variables = [f"{name}={value}" for name, value in server_environment(config).items()]
        options = old_server_options(config.source, ports, host=config.host)
        return [*variables, *server_prefix(config), "tritonserver", *options]

    def run(self, progress: Progress) -> Summary:
        """Serve until a signal, the file that asks for the end, or the time limit.

        Raises:
            StageError: the server failed and was not, or not any more, to be started again.
            ServerStartError: it did not become ready in the first place.
        """
        started = time.monotonic()
        reload_path = self.job.folder / RELOAD_NAME
        for stale in (self.endpoint_path, self.stop_path, reload_path):
            stale.unlink(missing_ok=True)
        service = Service(
            self.config,
            self.job.folder,
            progress,
            endpoint_path=self.endpoint_path,
            stop_path=self.stop_path,
            reload_path=reload_path,
            until=started + self._serving_s(),
        )
        try:
            reason = service.run()
        finally:
            if self.config.nodes > 1:
                announce_end(self.job.folder, job_id_here())
        served_s = round(time.monotonic() - started, 1)
        return {"served_s": served_s, "ended": reason, "restarts": service.restarts}

    def assist(self, place: LaunchEnvironment) -> None:
        """Do the part of a process other than the first, until the first is done.

        With our engine it is one rank of the model; with NVIDIA's, the server of a further node.

        Raises:
            StageError: NVIDIA's backend cannot use the model.
        """
        folder, job_id = self.job.folder, job_id_here()
        environment = server_environment(self.config)
        if self.config.engine != FASTERTRANSFORMER:
            take_part(folder, job_id, command=rank_command(), environment=environment)
            return
        from inference.server.installation import find_triton
        from inference.server.options import silent_server_options

        triton = find_triton(own_backends=False)
        program = [str(triton.program), *triton.arguments()]
        log_path = server_log(folder, f"{job_id}-rank{place.rank}")
        take_part(
            folder,
            job_id,
            command=[*program, *silent_server_options(self.config.source)],
            environment=environment | triton.environment(),
            log_path=log_path,
            check=lambda: _check_log(log_path),
        )


def _check_log(path: Path) -> None:
    """Raise StageError if NVIDIA's backend logs that it cannot use the model."""
    from inference.server.server_log import fatal_lines

    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if fatal := fatal_lines(text):
        raise StageError("\n".join([f"the server cannot use the model ({path}):", *fatal]))
