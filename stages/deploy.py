"""Stage `deploy`: a tritonserver that serves the repository until it is stopped."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.serving.process_place import ProcessPlace
from stages.base import JobSettings, Stage, StageError, Summary
from stages.deploy_config import FASTERTRANSFORMER, DeployConfig, check_deploy
from stages.endpoint import (
    ENDPOINT_NAME,
    JOB_ID_VARIABLE,
    STOP_NAME,
    Endpoint,
    job_id_here,
    read_endpoint,
    server_log,
    withdraw,
)
from stages.gemm_tuning import tuning_command
from stages.progress import Progress, write_json
from stages.ranks_meeting import call_off, end_meetings, losses, rank_command, take_part
from stages.serving import server_environment, server_prefix, serving

if TYPE_CHECKING:
    from inference.serving.server import TritonServer

__all__ = [
    "ENDPOINT_NAME",
    "JOB_ID_VARIABLE",
    "STOP_NAME",
    "DeployConfig",
    "DeployStage",
    "Endpoint",
    "check_deploy",
    "read_endpoint",
    "server_log",
    "serving",
]

_POLL_S = 0.5
# A server that is very busy may not answer for so long.
_PATIENCE_S = 30.0
_MAX_BACKOFF_S = 300.0
# Other nodes see files of this one a little later.
_LOSS_WAIT_S = 2.0
# Besides the time to drain: the models unload.
_UNLOAD_S = 20.0


class DeployStage(Stage):
    """Runs a server and publishes its address once it is ready."""

    name = "deploy"

    def __init__(self, job: JobSettings, config: DeployConfig) -> None:
        super().__init__(job)
        self.config = config

    @property
    def endpoint_path(self) -> Path:
        """Where the address of the running server is published."""
        return self.job.folder / ENDPOINT_NAME

    @property
    def stop_path(self) -> Path:
        """The file that asks the server to end."""
        return self.job.folder / STOP_NAME

    def check(self) -> list[str]:
        """Return the problems of engine, ports and times."""
        return check_deploy(self.config)

    def outputs(self) -> list[Path]:
        """Return nothing: a server leaves nothing behind."""
        return []

    def identity(self) -> dict[str, Any]:
        """Return nothing: a server is never finished earlier."""
        return {}

    def marker_path(self) -> Path | None:
        """Return None: a server is never finished earlier."""
        return None

    def readiness_path(self) -> Path:
        """Return the file that appears once the server is ready."""
        return self.endpoint_path

    def ask_to_stop(self) -> bool:
        """Leave word for the server to end."""
        self.stop_path.touch()
        return True

    def other_logs(self, job_id: str) -> list[Path]:
        """Return the server's log."""
        return [server_log(self.job.folder, job_id)]

    def stop_grace_s(self) -> float:
        """Return the time to drain, and some more for the models to unload."""
        return self.config.drain_s + _UNLOAD_S

    def notes(self) -> list[str]:
        """Return remarks, and the command of NVIDIA's server for users to see beforehand."""
        notes = list(self.config.remarks)
        if self.config.gemm_tuning is not None and self.config.weights_dir.exists():
            notes.append(f"deploy measures: {shlex.join(tuning_command(self.config))}")
        if self.config.engine == FASTERTRANSFORMER:
            notes.append(f"deploy starts: {shlex.join(self.server_command())}")
        return notes

    def server_command(self) -> list[str]:
        """Return the command line of the server of NVIDIA's backend, environment first."""
        from inference.serving.server_options import old_server_options

        config = self.config
        ports = {"http": config.http_port, "grpc": config.grpc_port, "metrics": config.metrics_port}
        variables = [f"{name}={value}" for name, value in server_environment(config).items()]
        options = old_server_options(config.source, ports)
        return [*variables, *server_prefix(config), "tritonserver", *options]

    def run(self, progress: Progress) -> Summary:
        """Serve until a signal, the file that asks for the end, or the time limit.

        Raises:
            StageError: the server failed and was not, or not any more, to be started again.
            ServerStartError: it did not become ready in the first place.
        """
        started = time.monotonic()
        limit_s = self.job.resources.time_limit_min * 60 - self.config.drain_s - self.job.warning_s
        for stale in (self.endpoint_path, self.stop_path):
            stale.unlink(missing_ok=True)
        service = _Service(self, progress, until=started + max(limit_s, 0.0))
        try:
            reason = service.run()
        finally:
            if self.config.nodes > 1:
                end_meetings(self.job.folder, job_id_here())
        served_s = round(time.monotonic() - started, 1)
        return {"served_s": served_s, "ended": reason, "restarts": service.restarts}

    def assist(self, place: ProcessPlace) -> None:
        """Do the part of a process other than the first, until the first is done.

        With our engine it is one rank of the model; with NVIDIA's, the server of a further node.

        Raises:
            StageError: NVIDIA's backend says that it cannot use the model.
        """
        folder, job_id = self.job.folder, job_id_here()
        environment = server_environment(self.config)
        if self.config.engine != FASTERTRANSFORMER:
            take_part(folder, job_id, command=rank_command(), environment=environment)
            return
        from inference.serving.installation import find_triton
        from inference.serving.server_options import silent_server_options

        triton = find_triton()
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
    """Raise StageError if NVIDIA's backend says that the model is not usable."""
    from inference.serving.fastertransformer_log import fatal_lines

    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if fatal := fatal_lines(text):
        raise StageError("\n".join([f"the server cannot use the model ({path}):", *fatal]))


class _Service:
    """A server that is started again when it fails, so often and so late as configured."""

    def __init__(self, stage: DeployStage, progress: Progress, *, until: float) -> None:
        self.restarts = 0
        self._stage = stage
        self._config = stage.config
        self._progress = progress
        self._until = until

    def run(self) -> str:
        """Return why the service ended in order. Raises StageError if it did not."""
        from inference.serving.server import ServerStartError

        while True:
            try:
                reason, failure = self._serve_once()
            except ServerStartError as error:
                if self.restarts == 0:
                    raise  # it has never worked: nothing changes by waiting
                self._call_off()
                reason, failure = "", str(error)
            if not failure:
                return reason
            if self.restarts >= self._config.max_restarts or not self._may_start_again:
                raise StageError(self._last_words(failure))
            self.restarts += 1
            if ended := self._wait(failure):
                return ended

    @property
    def _may_start_again(self) -> bool:
        """Whether all processes can meet anew; those of MPI cannot."""
        return self._config.engine != FASTERTRANSFORMER or self._config.nodes == 1

    def _serve_once(self) -> tuple[str, str]:
        """Serve; return why the service ended, or why the server failed."""
        stage = self._stage
        reason, failure = "stopped", ""
        with serving(self._config, stage.job.folder, self._progress, restarts=self.restarts) as (
            server,
            endpoint,
        ):
            # Clients find the next start where they found this one.
            self._config = replace(
                self._config,
                http_port=endpoint.http,
                grpc_port=endpoint.grpc,
                metrics_port=endpoint.metrics,
            )
            write_json(stage.endpoint_path, asdict(endpoint))
            with contextlib.suppress(KeyboardInterrupt):
                reason, failure = self._watch(server)
            if failure:
                self._call_off()
                failure = _with_tail("; ".join([*self._losses(), failure]), server)
            # A signal that comes while the server is already stopping changes nothing.
            with contextlib.suppress(KeyboardInterrupt):
                self._progress.update("stopping")
                withdraw(stage.endpoint_path, endpoint.job_id)
                server.stop(drain_s=0 if failure else self._config.drain_s)
            withdraw(stage.endpoint_path, endpoint.job_id)
        return reason, failure

    def _call_off(self) -> None:
        if self._config.nodes > 1:
            call_off(self._stage.job.folder, job_id_here(), self.restarts + 1)

    def _losses(self) -> list[str]:
        """Return which processes of further nodes were ended by force."""
        if self._config.nodes == 1:
            return []
        folder = self._stage.job.folder
        return losses(folder, job_id_here(), self.restarts + 1, wait_s=_LOSS_WAIT_S)

    def _watch(self, server: TritonServer) -> tuple[str, str]:
        """Block while the server serves; return why it should stop now, or why it failed."""
        self._progress.update(f"serving HTTP on {server.http_url}, gRPC on {server.grpc_url}")
        while True:
            if ended := self._ended():
                return ended, ""
            if failure := server.failure(patience_s=_PATIENCE_S):
                return "", failure
            time.sleep(_POLL_S)

    def _wait(self, failure: str) -> str:
        """Wait before the next start; return why there is none, if so."""
        wait_s = min(self._config.restart_backoff_s * 2.0 ** (self.restarts - 1), _MAX_BACKOFF_S)
        sys.stderr.write(
            f"{failure}\nstarting the server again in {wait_s:g} s "
            f"(restart {self.restarts} of {self._config.max_restarts})\n"
        )
        self._progress.update(f"starting again in {wait_s:g} s")
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline:
                if ended := self._ended():
                    return ended
                time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))
            return ""
        return "stopped"

    def _ended(self) -> str:
        """Return why the service should end now, empty if it should go on."""
        if self._stage.stop_path.exists():
            self._stage.stop_path.unlink()
            return "no longer needed"
        return "time limit" if time.monotonic() >= self._until else ""

    def _last_words(self, failure: str) -> str:
        if not self.restarts:
            return failure
        return f"the server failed again after {self.restarts} restarts: {failure}"


def _with_tail(failure: str, server: TritonServer) -> str:
    tail = "\n".join(f"  | {line}" for line in server.log_tail())
    return f"{failure}; last lines of {server.log_path}:\n{tail}"
