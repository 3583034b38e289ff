"""A server that is restarted when it fails, until it is no longer needed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import cast

from foundations.files.replace import read_file
from inference.server.log import ServerStartError, last_lines
from inference.server.process import kill
from inference.server.processes import descendants
from inference.server.server import NEXT_LOG, ModelServer
from inference.system.parent_process import LinkedProcess, uninterrupted
from inference.system.supervision import RESTARTS_VARIABLE
from stages.base import StageError
from stages.deploy_config import PYTORCH, DeployConfig, problems_of_exchange
from stages.endpoint import (
    ENDPOINT_NAME,
    RELOAD_NAME,
    STOP_NAME,
    ServerEndpoint,
    published_by,
    server_log,
)
from stages.job_process import STOP_SIGNALS, cause_of, job_id_here, log_line
from stages.progress import PROGRESS_NAME, Progress
from stages.server_starts import ServerStart, losses
from stages.serving import AnyServer, endpoint_of, serving

_POLL_S = 0.25
# A very busy server may not answer for so long. The supervisor notices earlier if a server
# has ended or a signal has stopped it.
_MAX_BACKOFF_S, _MOST_DOUBLED = 300.0, 64
# A failure after so long is unrelated to those before: they are forgotten, and the next start is
# immediate.
_STEADY_S = 600.0
# Other nodes see files of this one a little later.
_LOSS_WAIT_S = 2.0
_PUBLISH_AGAIN_S = 5.0
# A server that has served for so long gets a standby, whose imports take some seconds of a core:
# those of the first requests are not delayed by it.
_STANDBY_AFTER_S = 30.0
NOT_NEEDED = "no longer needed"
_TIME_LIMIT, _STOPPED, _HANDED_OVER = "time limit", "stopped", "handed over"
_RELOAD = "reload"


class _EndedError(Exception):
    """The service should end although its server is not ready; the message says why."""


@dataclass(eq=False)
class Service:
    """Keeps a server running; nothing is started before `run`.

    Attributes:
        folder: of the job, for logs, server starts, the address of a server that is ready, and
            requests to end or to reload it (`stages.endpoint`).
        progress: receives what the service is doing, and is in `folder` at the latest once the
            address is published: in a chain of jobs the predecessor reports until then.
        until: on the monotonic clock, when the job's time is over.
        restarts: how often the server was started again.
    """

    config: DeployConfig
    folder: Path
    progress: Progress
    _: KW_ONLY
    until: float
    restarts: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)  # since the last sound service
    _is_published: bool = field(default=False, init=False)
    _serves: ServerEndpoint | None = field(default=None, init=False)
    _publish_at: float = field(default=0.0, init=False)  # next attempt; 0 without a failed one
    _wanted: str = field(default="", init=False)  # a repository that was asked for by its path
    _standby: LinkedProcess | None = field(default=None, init=False)  # for the next start

    def run(self) -> str:
        """Serve until the end, and return why the service ended.

        Raises:
            StageError: it did not, or its time was over before the server was ever ready.
            ServerStartError: the server did not become ready in the first place.
        """
        try:
            return self._run()
        finally:
            self._end_standby()

    def _run(self) -> str:
        while True:
            try:
                reason, failure = self._serve_once()
            except _EndedError as error:
                return str(error)
            except (ServerStartError, OSError) as error:
                if self._serves is None:
                    raise  # it has never worked: waiting changes nothing
                self._call_off()
                reason, failure = "", cause_of(error, folder=self.folder)
            if reason == _RELOAD:
                self._end_standby()  # it counts another start
                continue  # with other weights, which did not go into the server that was there
            if not failure:
                return reason
            if self._failures >= self.config.max_restarts or not self.config.may_start_again:
                again = f"the server failed again after {self._failures} restarts: "
                raise StageError((again if self._failures else "") + failure)
            self.restarts += 1
            self._failures += 1
            if ended := self._wait(failure):
                return ended

    def _serve_once(self) -> tuple[str, str]:
        """Serve; return why the service ended, or why the server failed."""
        with contextlib.ExitStack() as to_the_end, contextlib.ExitStack() as stack:
            server, endpoint = self._start(stack)
            self._serves = endpoint
            # Clients find the next start where they found this one.
            self.config = self.config.with_ports(**endpoint.ports)
            reason, failure = _STOPPED, ""
            with contextlib.suppress(KeyboardInterrupt):
                try:
                    outcome = self._watch(server)
                    while outcome == (_RELOAD, "") and self._reload(server):
                        outcome = self._watch(server)
                    reason, failure = outcome
                except _EndedError as ended:  # while a new server was loading
                    reason = str(ended)
            if failure:
                self._call_off()
                if self.config.nodes > 1:  # a signal may have ended processes of further nodes
                    number = self.restarts + 1
                    lost = losses(self.folder, job_id_here(), number, wait_s=_LOSS_WAIT_S)
                    failure = "; ".join([*lost, failure])
                tail = "\n".join(f"  | {line}" for line in last_lines(server.log_path))
                failure = f"{failure}; last lines of {server.log_path}:\n{tail}"
            if not failure and reason != _RELOAD:  # a signal that comes now changes nothing
                to_the_end.enter_context(uninterrupted(*STOP_SIGNALS))
            try:
                if reason != _HANDED_OVER:  # the successor reports from now on
                    self.progress.update("stopping")
                log_line(f"stopping: {reason or 'the server failed'}")
                self._withdraw(endpoint)
                # After a hand-over running requests may take all the time that is left.
                left_s = self.until - time.monotonic() if reason == _HANDED_OVER else 0.0
                drain_s = self.config.drain_s + max(left_s, 0.0)
                server.stop(drain_s=0 if failure else drain_s)
            except KeyboardInterrupt:  # no other server follows
                reason, failure = _STOPPED, ""
            self._withdraw(endpoint)
        return reason, failure

    def _start(self, stack: contextlib.ExitStack) -> tuple[AnyServer, ServerEndpoint]:
        """Start a server for the life of the stack and publish its address."""
        standby, self._standby = self._standby, None
        if standby is not None:
            stack.callback(_end, standby)
        server, endpoint = stack.enter_context(
            serving(
                self.config,
                self.folder,
                self.progress,
                restarts=self.restarts,
                standby=standby,
                check=self._check_needed,
            )
        )
        self.progress.path, self._is_published = self.folder / PROGRESS_NAME, False
        self._publish(endpoint)
        log_line(f"serving {endpoint}")
        return server, endpoint

    def _publish(self, endpoint: ServerEndpoint) -> None:
        """Publish the address, or try again later: a full disk ends no server.

        After a restart clients find this server where they found the one before.
        """
        try:
            endpoint.publish(self.folder / ENDPOINT_NAME)
        except OSError as error:
            if self._publish_at == 0:
                log_line(f"the address cannot be written: {cause_of(error, folder=self.folder)}")
            self._publish_at = time.monotonic() + _PUBLISH_AGAIN_S
        else:
            self._publish_at, self._is_published = 0.0, True

    def _withdraw(self, endpoint: ServerEndpoint) -> None:
        self._publish_at, self._is_published = 0.0, False
        with contextlib.suppress(OSError):  # without room for a lock, nothing was published
            endpoint.withdraw(self.folder / ENDPOINT_NAME)

    def _reload(self, server: AnyServer) -> bool:
        """Have a server load its repository anew; it answers meanwhile, and if that fails.

        Of a repository that was named, its weights go into the engine that is there. Return False
        where that fails: the server has to be started again, with them.
        """
        wanted, self._wanted = self._wanted, ""
        if wanted:
            self.config = replace(self.config, folder=Path(wanted))
            if problems := problems_of_exchange(self.config):
                log_line(f"the server is started again: {problems[0]}")
                return False
        if self.config.nodes > 1 or self.config.engine != PYTORCH:
            log_line(
                "a server on several nodes, another engine's or NVIDIA's cannot be reloaded; "
                "restart the stage"
            )
            return True
        own = cast("ModelServer", server)
        self.progress.update("loading the new repository")
        try:
            own.reload(
                timeout_s=self.config.ready_timeout_s,
                check=self._check_needed,
                repository=wanted or None,
                exchanges=bool(wanted),
            )
            self._serves = endpoint_of(self.config, own, self.restarts)
            self._publish(self._serves)
        except (StageError, ValueError) as error:
            kept = "the server is started again" if wanted else "the server goes on as it was"
            log_line(f"not reloaded; {kept}: {error}")
            return not wanted
        if wanted:
            log_line(f"serving the weights of {wanted}")
        return True

    def _check_needed(self) -> None:
        """Raise if a server that is still loading should end."""
        ended = self._ended()
        if ended == _TIME_LIMIT and self.restarts == 0:
            raise StageError(
                "the job's time was over before the server was ready; raise deploy.time_limit"
            )
        if ended:
            raise _EndedError(ended)

    def _call_off(self) -> None:
        if self.config.nodes == 1:
            return
        with contextlib.suppress(OSError):  # on a full disk the others end by their own failure
            ServerStart(job_id_here(), self.restarts + 1, is_over=True).announce(self.folder)

    def _watch(self, server: AnyServer) -> tuple[str, str]:
        """Block while the server serves; return why it should stop now, or why it failed."""
        began = time.monotonic()
        self.progress.update(f"serving {self._serves}")
        while True:
            if ended := self._ended():
                if ended == _HANDED_OVER:
                    self._serve_the_last(cast("ModelServer", server))
                return ended, ""
            with contextlib.suppress(OSError, ValueError):  # usually there is none
                wanted = self.folder / RELOAD_NAME
                self._wanted = read_file(wanted).decode().strip()
                wanted.unlink()  # another job may have taken it
                return _RELOAD, ""
            if 0 < self._publish_at <= time.monotonic() and self._serves is not None:
                self._publish(self._serves)
            if failure := server.failure():
                if time.monotonic() - began > _STEADY_S:
                    self._failures = 0
                return "", failure
            if time.monotonic() - began > _STANDBY_AFTER_S:
                self._prepare(server)
            server.ended_within(_POLL_S)

    def _prepare(self, server: AnyServer) -> None:
        """Have a process of this project's own server ready, should this one fail."""
        if self._standby is not None or self._failures >= self.config.max_restarts:
            return
        if isinstance(server, ModelServer) and not server.has_triton and self.config.nodes == 1:
            with contextlib.suppress(OSError):
                self._standby = server.prepared({RESTARTS_VARIABLE: str(self.restarts + 1)})

    def _end_standby(self) -> None:
        if self._standby is not None:
            _end(self._standby)
            self._standby = None
            server_log(self.folder, job_id_here()).with_suffix(NEXT_LOG).unlink(missing_ok=True)

    def _serve_the_last(self, server: ModelServer) -> None:
        """Go on for clients that have not followed to the successor, while there are any."""
        began = time.time()
        while time.monotonic() < self.until and server.failure() is None:
            if time.time() - max(began, server.last_used()) > self.config.drain_s:
                return
            time.sleep(_POLL_S)

    def _wait(self, failure: str) -> str:
        """Wait before the next start; return the reason if there is none.

        The first start after a failure is immediate: most failures do not come back at once.
        """
        doubled = self.config.restart_backoff_s * 2.0 ** min(self._failures - 2, _MOST_DOUBLED)
        wait_s = 0.0 if self._failures == 1 else min(doubled, _MAX_BACKOFF_S)
        log_line(
            f"{failure}\nstarting the server again in {wait_s:g} s "
            f"(restart {self._failures} of {self.config.max_restarts})"
        )
        self.progress.update(f"starting again in {wait_s:g} s")
        deadline = time.monotonic() + wait_s
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < deadline:
                if ended := self._ended():
                    return ended
                time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))
            return ""
        return _STOPPED

    def _ended(self) -> str:
        """Return why the service should end now, empty if it should go on."""
        is_current = True
        if self.config.uptime_s is not None:  # a job of a chain may have a successor that serves
            serves = published_by(self.folder / ENDPOINT_NAME)
            # A successor that has ended by request withdraws its address.
            is_current = not self._is_published if serves == "" else serves in (job_id_here(), None)
        with contextlib.suppress(OSError, ValueError):  # usually there is none
            for_job = read_file(self.folder / STOP_NAME).decode(errors="replace").strip()
            # Without the id of a job it is for the one that serves.
            if for_job == job_id_here() or (is_current and not for_job):
                with contextlib.suppress(OSError):
                    (self.folder / STOP_NAME).unlink()
                return NOT_NEEDED
        if not is_current and self._serves is not None:
            return _HANDED_OVER
        return _TIME_LIMIT if time.monotonic() >= self.until else ""


def _end(process: LinkedProcess) -> None:
    """End a process and those below it; one that has become a server has ended."""
    below = descendants(process.pid)
    process.link.close()
    process.kill()
    process.wait()
    kill(below)
