"""A server that is restarted when it fails, until it is no longer needed."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
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
from stages.server_starts import ServerStart, lost_processes
from stages.serving import AnyServer, endpoint_of, serving

_POLL_S = 0.25
_MAX_BACKOFF_S, _MAX_DOUBLINGS = 300.0, 64
# After so much service, earlier failures are considered unrelated: the count starts again at 0.
_STEADY_S = 600.0
# Files of other nodes become visible with a delay.
_LOSS_WAIT_S = 2.0
_PUBLISH_AGAIN_S = 5.0
# A standby process is started only after so much service: its imports take some seconds of a core,
# which must not delay the first requests.
_STANDBY_AFTER_S = 30.0
NOT_NEEDED = "no longer needed"
_TIME_LIMIT, _STOPPED, _HANDED_OVER = "time limit", "stopped", "handed over"


class _EndedError(Exception):
    """The service should end; the message is the reason."""


class _LostError(RuntimeError):
    """The server failed; the message is the reason."""


@dataclass(eq=False)
class Service:
    """Keeps a server running; nothing is started before `run`.

    Attributes:
        folder: the job's folder, with logs, server starts, the published address, and requests to
            end or reload (`stages.endpoint`).
        progress: receives the service's phases. In a chain of jobs it gets its path in `folder`
            only when the address is published: until then the predecessor reports.
        until: monotonic time at which the job's time is over.
        restarts: how often the server was restarted.
    """

    config: DeployConfig
    folder: Path
    progress: Progress
    _: KW_ONLY
    until: float
    restarts: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)  # in a row
    _is_published: bool = field(default=False, init=False)
    _endpoint: ServerEndpoint | None = field(default=None, init=False)  # None until first ready
    _republish_at: float = field(default=0.0, init=False)  # monotonic; 0 if nothing failed
    _standby: LinkedProcess | None = field(default=None, init=False)  # for the next start

    def run(self) -> str:
        """Serve, and return why the service ended.

        Raises:
            StageError: the server failed too often, or its time was over before it was ever ready.
            ServerStartError: the first start failed.
        """
        try:
            return self._run()
        finally:
            self._end_standby()

    def _run(self) -> str:
        while True:
            try:
                self._serve_once()
            except _EndedError as ended:
                return str(ended)
            except (ServerStartError, OSError, _LostError) as error:
                if self._endpoint is None:
                    raise  # it has never worked, so a restart will not help
                self._announce_failure()
                failure = cause_of(error, folder=self.folder)
                if self._failures >= self.config.max_restarts or not self.config.may_start_again:
                    again = f"the server failed again after {self._failures} restarts: "
                    raise StageError((again if self._failures else "") + failure) from error
                self.restarts += 1
                self._failures += 1
                if reason := self._wait(failure):
                    return reason
                continue
            self._end_standby()  # its number of restarts is fixed

    def _serve_once(self) -> None:
        """Serve until the server has to be started again with other weights.

        Raises:
            _EndedError: the service ends.
            _LostError: the server failed.
        """
        end: Exception | None = None
        with ExitStack() as to_the_end, ExitStack() as stack:
            server, endpoint = self._start(stack)
            self._endpoint = endpoint
            # The next start uses the same ports, so that clients find it.
            self.config = self.config.with_ports(**endpoint.ports)
            drain_s = self.config.drain_s
            try:
                self._watch(server)
            except KeyboardInterrupt:
                end = _EndedError(_STOPPED)
            except _EndedError as ended:
                end = ended
            except _LostError as lost:
                self._announce_failure()
                end, drain_s = self._described(lost, server), 0.0
            if isinstance(end, _EndedError):  # further signals change nothing
                to_the_end.enter_context(uninterrupted(*STOP_SIGNALS))
            try:
                if str(end) == _HANDED_OVER:
                    # The successor reports, and running requests may take all the remaining time.
                    drain_s += max(self.until - time.monotonic(), 0.0)
                else:
                    self.progress.update("stopping")
                reason = end if isinstance(end, _EndedError) else "the server, for another start"
                log_line(f"stopping: {reason}")
                self._withdraw(endpoint)
                server.stop(drain_s=drain_s)
            except KeyboardInterrupt:  # do not restart
                end = _EndedError(_STOPPED)
            self._withdraw(endpoint)
        if end is not None:
            raise end

    def _described(self, lost: _LostError, server: AnyServer) -> _LostError:
        """Return a failure with the ranks that were lost, and the end of the server's log."""
        causes = [str(lost)]
        if self.config.nodes > 1:  # a signal may have ended processes on other nodes
            number = self.restarts + 1
            causes[:0] = lost_processes(self.folder, job_id_here(), number, wait_s=_LOSS_WAIT_S)
        tail = "\n".join(f"  | {line}" for line in last_lines(server.log_path))
        return _LostError(f"{'; '.join(causes)}; last lines of {server.log_path}:\n{tail}")

    def _start(self, stack: ExitStack) -> tuple[AnyServer, ServerEndpoint]:
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
        """Publish the address; try again later if that fails, for example on a full disk."""
        try:
            endpoint.publish(self.folder / ENDPOINT_NAME)
        except OSError as error:
            if self._republish_at == 0:
                log_line(f"the address cannot be written: {cause_of(error, folder=self.folder)}")
            self._republish_at = time.monotonic() + _PUBLISH_AGAIN_S
        else:
            self._republish_at, self._is_published = 0.0, True

    def _withdraw(self, endpoint: ServerEndpoint) -> None:
        self._republish_at, self._is_published = 0.0, False
        with suppress(OSError):  # a disk too full for the lock has no address either
            endpoint.withdraw(self.folder / ENDPOINT_NAME)

    def _reload(self, server: AnyServer, requested: str) -> bool:
        """Let a server reload its repository, or exchange its weights for a requested one's.

        It keeps answering during a reload, even if that fails. Return False if an exchange fails:
        the server must then be restarted with the requested repository.
        """
        if requested:
            self.config = replace(self.config, folder=Path(requested))
            if problems := problems_of_exchange(self.config):
                log_line(f"restarting the server: {problems[0]}")
                return False
        if self.config.nodes > 1 or self.config.engine != PYTORCH:
            log_line(
                "cannot reload a server on several nodes, of another engine or of NVIDIA's backend;"
                " restart the stage"
            )
            return True
        model_server = cast("ModelServer", server)
        self.progress.update("loading the new repository")
        try:
            model_server.reload(
                timeout_s=self.config.ready_timeout_s,
                check=self._check_needed,
                repository=requested or None,
                exchanges=bool(requested),
            )
            self._endpoint = endpoint_of(self.config, model_server, self.restarts)
            self._publish(self._endpoint)
        except (StageError, ValueError) as error:
            effect = "restarting the server" if requested else "the server continues unchanged"
            log_line(f"reload failed; {effect}: {error}")
            return not requested
        if requested:
            log_line(f"serving the weights of {requested}")
        return True

    def _check_needed(self) -> None:
        """Raise an error if a server that is still loading should end."""
        ended = self._end_reason()
        if ended == _TIME_LIMIT and self.restarts == 0:
            raise StageError(
                "the job's time was over before the server was ready; raise deploy.time_limit"
            )
        if ended:
            raise _EndedError(ended)

    def _announce_failure(self) -> None:
        if self.config.nodes == 1:
            return
        with suppress(OSError):  # on a full disk, the others end by their own failures
            ServerStart(job_id_here(), self.restarts + 1, is_over=True).announce(self.folder)

    def _watch(self, server: AnyServer) -> None:
        """Block while the server serves; return if an exchange of its weights has failed.

        Raises:
            _EndedError: the service ends.
            _LostError: the server failed.
        """
        began = time.monotonic()
        self.progress.update(f"serving {self._endpoint}")
        while True:
            if ended := self._end_reason():
                if ended == _HANDED_OVER:
                    self._serve_remaining_clients(cast("ModelServer", server))
                raise _EndedError(ended)
            if (requested := self._requested_reload()) is not None:
                if not self._reload(server, requested):
                    return
                began = time.monotonic()
                self.progress.update(f"serving {self._endpoint}")
            if 0 < self._republish_at <= time.monotonic() and self._endpoint is not None:
                self._publish(self._endpoint)
            if failure := server.failure():
                if time.monotonic() - began > _STEADY_S:
                    self._failures = 0
                raise _LostError(failure)
            if time.monotonic() - began > _STANDBY_AFTER_S:
                self._start_standby(server)
            server.ended_within(_POLL_S)

    def _requested_reload(self) -> str | None:
        """Take a request to reload; return the path in it, and None without a request."""
        with suppress(OSError, ValueError):
            path = self.folder / RELOAD_NAME
            requested = read_file(path).decode().strip()
            path.unlink()  # fails if another job has taken it
            return requested
        return None

    def _start_standby(self, server: AnyServer) -> None:
        """Keep a standby process of this project's own server, for a fast restart."""
        if self._standby is not None or self._failures >= self.config.max_restarts:
            return
        if isinstance(server, ModelServer) and not server.has_triton and self.config.nodes == 1:
            with suppress(OSError):
                self._standby = server.prepared({RESTARTS_VARIABLE: str(self.restarts + 1)})

    def _end_standby(self) -> None:
        if self._standby is not None:
            _end(self._standby)
            self._standby = None
            server_log(self.folder, job_id_here()).with_suffix(NEXT_LOG).unlink(missing_ok=True)

    def _serve_remaining_clients(self, server: ModelServer) -> None:
        """Keep serving clients that still use this server instead of its successor."""
        began = time.time()
        while time.monotonic() < self.until and server.failure() is None:
            if time.time() - max(began, server.last_used()) > self.config.drain_s:
                return
            time.sleep(_POLL_S)

    def _wait(self, failure: str) -> str:
        """Wait before the next start; return the reason if the service should end instead.

        The first restart is immediate: most failures do not recur at once.
        """
        doubled = self.config.restart_backoff_s * 2.0 ** min(self._failures - 2, _MAX_DOUBLINGS)
        wait_s = 0.0 if self._failures == 1 else min(doubled, _MAX_BACKOFF_S)
        log_line(
            f"{failure}\nrestarting the server in {wait_s:g} s "
            f"(restart {self._failures} of {self.config.max_restarts})"
        )
        self.progress.update(f"restarting in {wait_s:g} s")
        deadline = time.monotonic() + wait_s
        with suppress(KeyboardInterrupt):
            while time.monotonic() < deadline:
                if ended := self._end_reason():
                    return ended
                time.sleep(min(_POLL_S, max(deadline - time.monotonic(), 0.0)))
            return ""
        return _STOPPED

    def _end_reason(self) -> str:
        """Return why the service should end now; empty if it should continue."""
        is_current = True
        if self.config.uptime_s is not None:  # in a chain, a successor may already serve
            serves = published_by(self.folder / ENDPOINT_NAME)
            # No address: a successor that ended by request has withdrawn it.
            is_current = not self._is_published if serves == "" else serves in (job_id_here(), None)
        with suppress(OSError, ValueError):  # usually there is no request
            for_job = read_file(self.folder / STOP_NAME).decode(errors="replace").strip()
            # Without a job id, the request is for the job that serves.
            if for_job == job_id_here() or (is_current and not for_job):
                with suppress(OSError):
                    (self.folder / STOP_NAME).unlink()
                return NOT_NEEDED
        if not is_current and self._endpoint is not None:
            return _HANDED_OVER
        return _TIME_LIMIT if time.monotonic() >= self.until else ""


def _end(process: LinkedProcess) -> None:
    """Kill a standby process and its descendants; one that became a server has already ended."""
    below = descendants(process.pid)
    process.link.close()
    process.kill()
    process.wait()
    kill(below)
