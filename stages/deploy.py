"""Stage `deploy`: run a server of the repository, or of another engine, until it is stopped."""

import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundations.files.replace import replace_file
from inference.server.openai_server import MODEL_FIELD
from inference.system.launch_environment import LaunchEnvironment
from inference.system.ports import port_problem
from stages.base import Stage, StageError, Summary
from stages.deploy_config import FASTERTRANSFORMER, DeployConfig, check_deploy
from stages.endpoint import ENDPOINT_NAME, RELOAD_NAME, STOP_NAME, server_log
from stages.job_process import job_id_here
from stages.progress import Progress
from stages.server_starts import ServerStart, run_for_each_start
from stages.service import Service
from stages.serving import server_environment, server_prefix

_UNLOAD_S = 20.0  # time for models to unload, after the server has drained


@dataclass(eq=False)
class DeployStage(Stage):
    """Runs a server and publishes its address once it is ready.

    Attributes:
        predecessor: id of the job that this one replaces in a chain (`deploy.uptime`); "" if none.
        ends_at: Unix time at which the chain ends; None in its first job.
        ends_with_evaluation: whether the server is needed only by the pipeline's evaluation.
    """

    name = "deploy"

    config: DeployConfig
    predecessor: str = ""
    ends_at: float | None = None
    ends_with_evaluation: bool = False

    def check(self) -> Iterator[str]:
        """Yield the problems of the server's configuration and times."""
        yield from check_deploy(self.config)
        lead_s, serving_s = self.config.handover_s, self.serving_s
        if self.config.uptime_s is not None and lead_s is not None and 0 < serving_s <= lead_s:
            yield (
                f"deploy.handover_s={lead_s:g} is not below the {serving_s:g} s that a job of "
                f"{self.job.resources.time_limit} serves; lower it."
            )
        if serving_s <= 0:
            yield (
                f"deploy.time_limit: {self.job.resources.time_limit} would leave no time to "
                f"serve: the last {self.config.drain_s + self.job.warning_s:g} s are for running "
                "requests (deploy.drain_s) and the scheduler's warning; give more."
            )

    @property
    def serving_s(self) -> float:
        """Seconds that one job has for loading and serving."""
        limit_s = self.job.resources.time_limit_min * 60
        return limit_s - self.config.drain_s - self.job.warning_s

    @property
    def alone_s(self) -> float:
        """Seconds from the start of a job in a chain until its successor may start."""
        lead_s = self.config.handover_s
        return self.serving_s - (self.serving_s / 4 if lead_s is None else lead_s)

    @property
    def is_chained(self) -> bool:
        """Whether the server outlives the time limit of one job."""
        return self.config.uptime_s is not None and self.config.uptime_s > self.serving_s

    def _chain_notes(self) -> list[str]:
        """Return a note on the chain of jobs that `deploy.uptime` needs."""
        uptime_s = self.config.uptime_s
        if uptime_s is None:
            return []
        if uptime_s <= self.serving_s:
            return [f"one job is enough for deploy.uptime={self.config.uptime}"]
        count = 1 + math.ceil((uptime_s - self.serving_s) / self.alone_s)
        return [
            f"a chain of at least {count} jobs serves for deploy.uptime={self.config.uptime}: each "
            f"submits the next, which may start {self.alone_s / 60:.0f} minutes after it and takes "
            "over once it is ready"
        ]

    def new_progress(self) -> Progress:
        """Return the progress reporter; it writes no file while the predecessor serves."""
        return Progress() if self.predecessor else super().new_progress()

    def readiness_path(self) -> Path:
        """Return the file with the server's address, which is written once it is ready."""
        return self.job.folder / ENDPOINT_NAME

    def ask_to_stop(self) -> bool:
        """Ask the server to end, by the file that it watches; return False if the disk is full."""
        with suppress(OSError):
            # The job id in the file keeps a predecessor or successor running.
            replace_file(self.job.folder / STOP_NAME, job_id_here())
            return True
        return False

    def other_logs(self, job_id: str) -> list[Path]:
        """Return the server's log."""
        return [server_log(self.job.folder, job_id)]

    def stop_grace_s(self) -> float:
        """Return the time to drain and to unload the models, in seconds."""
        return self.config.drain_s + _UNLOAD_S

    def notes(self) -> Iterator[str]:
        """Yield notes, including the command of another engine or of NVIDIA's server."""
        config = self.config
        yield from (*config.remarks, *self._chain_notes())
        if config.max_restarts and not config.may_start_again:
            yield (
                f"deploy.max_restarts={config.max_restarts} has no effect with NVIDIA's backend "
                "over several nodes: its processes can initialize MPI only once, so a failure ends "
                "the job; start the stage again then"
            )
        if config.is_other_engine:
            yield f"deploy starts: {shlex.join(config.command_line)}"
        if config.engine == FASTERTRANSFORMER:
            variables = [f"{name}={value}" for name, value in server_environment(config).items()]
            program = ["tritonserver", f"--model-repository={config.source}"]
            command = [*variables, *server_prefix(config), *program]
            yield f"deploy starts: {shlex.join(command)}"

    def run(self, progress: Progress) -> Summary:
        """Serve until a signal, a stop request or the time limit.

        Raises:
            StageError: the server failed and may not be restarted, or not any more.
            ServerStartError: its first start failed.
        """
        started = time.monotonic()
        config = self.config
        if self.predecessor:
            # Pick free ports where needed: the predecessor may run on the same node.
            ports = {
                name: 0 if port and port_problem(config.host, port) else port
                for name, port in config.ports.items()
            }
            config = config.with_ports(**ports)
        else:
            for stale in (ENDPOINT_NAME, STOP_NAME, RELOAD_NAME):
                (self.job.folder / stale).unlink(missing_ok=True)
        serving_s = self.serving_s
        if config.uptime_s is not None:
            left_s = config.uptime_s if self.ends_at is None else self.ends_at - time.time()
            serving_s = min(serving_s, left_s)
        service = Service(config, self.job.folder, progress, until=started + serving_s)
        try:
            reason = service.run()
        finally:
            if self.config.nodes > 1:
                ServerStart(job_id_here(), 0).announce(self.job.folder)
        served_s = round(time.monotonic() - started, 1)
        return {"served_s": served_s, "ended": reason, "restarts": service.restarts}

    def assist(self, place: LaunchEnvironment) -> None:
        """Run a process other than the first, until the first one is done.

        With our engine it is one rank of the model; with others, the server on a further node.

        Raises:
            StageError: NVIDIA's backend cannot load the model.
        """
        folder, job_id = self.job.folder, job_id_here()
        environment = server_environment(self.config)
        if self.config.engine != FASTERTRANSFORMER:
            command = [sys.executable, "-u", "-m", "inference.ranks.launched_rank"]
            if self.config.is_other_engine:
                command = [
                    str(self.config.folder) if word == MODEL_FIELD else word
                    for word in self.config.command_on(place.rank)
                ]
            run_for_each_start(folder, job_id, command=command, environment=environment)
            return
        from inference.server.installation import find_triton
        from inference.server.log import fatal_lines

        triton = find_triton(own_backends=False)
        # Clients reach only the server on the first node.
        closed = [f"--allow-{name}=false" for name in ("http", "grpc", "metrics")]
        program = [str(triton.program), *triton.arguments(), *closed]
        path = server_log(folder, f"{job_id}-rank{place.rank}")

        def check() -> None:
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            if fatal := fatal_lines(text):
                raise StageError("\n".join([f"the server cannot use the model ({path}):", *fatal]))

        run_for_each_start(
            folder,
            job_id,
            command=[*program, f"--model-repository={self.config.source}"],
            environment=environment | triton.environment(),
            log_path=path,
            check=check,
        )
