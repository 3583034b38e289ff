"""One tritonserver process: start it, wait until it is ready, watch it, stop all of it."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from pathlib import Path

from inference.front.access import OpenAIOptions
from inference.front.link import FrontProcess, FrontSettings, Readiness, Served
from inference.front.rules import READY_PATH
from inference.front.sockets import ServerSockets, new_sockets
from inference.front.validation import leaves_types_to_the_backend, read_configs
from inference.ports import accepts_connections
from inference.private_folder import plain_folder
from inference.server import supervisor
from inference.server.admin import Admin, RefusalError, is_interactive
from inference.server.health import Health, front_target, model_targets
from inference.server.installation import find_triton, old_server_options, server_options
from inference.server.process import ServedProcess
from inference.server.segments import user_prefix
from inference.server.server_log import (
    ServerLog,
    ServerStartError,
    crash_of,
    last_lines,
    put_aside,
    short_reason,
)
from inference.supervision import REPORTS_VARIABLE

_POLL_S = 0.1
_TAKE_OVER_S = 60.0  # the front loads the new server's tokenizer
_PORT_TAKEN = re.compile(r"Address already in use|failed to start \w+ service", re.IGNORECASE)
_UNLOADING = "live models and "  # logged every second once all requests are answered
_DRAINED = "Found 0 live models"  # what remains is closing idle connections, which takes seconds
# Server 2.51 never unloads a model if the last frame of one of its streams was on the way when the
# client cancelled: the stream keeps the request, and the request the model.
_UNLOAD_S = 10.0


@dataclass(eq=False)
class TritonServer(ServedProcess):
    """One tritonserver process, its child processes, and the front that clients reach.

    Attributes:
        prefix: starts the server, such as mpirun.
        is_old: keeps to the options that every release knows: the server then listens itself,
            without a front, and leaves the control of models open to clients.
        openai: adds an endpoint of OpenAI's protocol, which needs the front.
        hidden: width of the hidden states that an encoder takes; an encoder of unknown width is not
            asked whether it answers.
        former: a server whose front and ports this one gets by `take_over`.
    """

    model_repository: Path | str
    _: KW_ONLY
    prefix: Sequence[str] = ()
    is_old: bool = False
    openai: OpenAIOptions | None = None
    hidden: int | None = None
    former: TritonServer | None = None

    def __post_init__(self) -> None:
        assert self.openai is None or not self.is_old, "the endpoint needs the front"
        if self.openai is not None:
            self.ports = {**self.ports, "openai": self.openai.port}
        super().__post_init__()
        self._source = str(self.model_repository)
        self._stopped_since: dict[str, float] = {}  # by process
        self._admin: Admin | None = None
        self._health: Health | None = None
        # Prefix of the server's segments in /dev/shm, by which those of a killed server are found.
        self._shm_prefix = f"{user_prefix()}{secrets.token_hex(8)}-"
        self._sockets: ServerSockets | None = None
        self._front: FrontProcess | None = None
        self._held = contextlib.ExitStack()  # what a start has made, and its end removes
        self._has_successor = False

    @property
    def openai_url(self) -> str | None:
        """Base URL of OpenAI's protocol for clients on this machine, None without it."""
        if "openai" not in self.ports:
            return None
        scheme = "https" if self.uses_tls else "http"
        return f"{scheme}://{self.address('openai')}/v1"

    @property
    def control_address(self) -> str:
        """Target of gRPC at which the server answers only its owner.

        It offers all of Triton's API, including the loading and unloading of models.
        """
        return self.address("grpc") if self._sockets is None else f"unix:{self._sockets.grpc}"

    @property
    def admin(self) -> Admin:
        """The owner's connection to a started server."""
        if self._admin is None:
            self._admin = Admin(self.control_address, hidden=self.hidden)
        return self._admin

    def port_problems(self) -> list[str]:
        """Return a message for every wanted port that is unavailable."""
        return [] if self.former is not None else super().port_problems()

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
        crash_retries: int = 1,
    ) -> None:
        """Start the server and return once every model is ready.

        `check` is called repeatedly; an exception that it raises ends the start. A program that
        crashes is started again `crash_retries` times: tritonserver 2.51 does so once in some
        hundred starts. Once ready, the server ends with a model's process, or when a process stays
        stopped.

        Raises:
            ServerStartError: a port is taken, the server ended, a model failed or time ran out; no
                process is left then.
            FileNotFoundError: tritonserver is not installed on this machine.
        """
        self._check_ports()
        deadline = time.monotonic() + timeout_s
        # Another process can take a chosen port before the server opens it.
        for attempts_left in (2, 1, 0):
            log = self._launch()
            try:
                self._await_ready(log, deadline, timeout_s, progress, check)
            except BaseException as error:
                self.stop(drain_s=0)
                if not (isinstance(error, ServerStartError) and attempts_left):
                    raise
                if error.is_crash and crash_retries:
                    crash_retries -= 1
                    kept = put_aside(self.log_path)
                    with contextlib.suppress(OSError):  # on a full disk
                        sys.stderr.write(f"{error.summary} starting it again; its log is {kept}\n")
                elif 0 not in self._wanted_ports.values() or not _PORT_TAKEN.search(
                    "\n".join(last_lines(self.log_path, 50))
                ):
                    raise
            else:
                self._order(supervisor.READY)
                return

    def await_answer(self, model: str, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Send a model of a started server a small request, and wait for the answer.

        `check` is called repeatedly; an exception that it raises ends the wait. Raises
        ServerStartError if the model has answered with an error, or not within `timeout_s`, or the
        server has ended.
        """
        summary = "tritonserver is ready, but does not answer:"
        pool = ThreadPoolExecutor(1, thread_name_prefix="probe")
        answered = pool.submit(self.admin.ask, model, timeout_s=timeout_s)
        pool.shutdown(wait=False)
        while not answered.done():
            check()
            if (status := self.poll()) is not None:
                ended = f"tritonserver ended with status {status} at its first request"
                self._fail(summary, [ended])
            wait([answered], timeout=_POLL_S)
        if (error := answered.exception()) is not None:
            words = f"model {model} did not answer a first small request: {error}"
            self._fail(summary, f"{words} (within {timeout_s:g} s)".splitlines())

    def watch_answers(self, **times: float) -> None:
        """Make `failure` report models that are loaded but do not answer.

        Each model gets a small request every few seconds; `times` are those of `Health`.
        """
        if self.is_old:  # NVIDIA's backend would keep a canary waiting behind long requests
            return
        assert self._process is not None, "the server was not started"
        targets = model_targets(self.admin, self.models, root=self._process.pid)
        if self._front is not None:
            targets += [
                front_target(self, name, pid=self._front.pid)
                for name in ("http", "openai")
                if name in self.ports
            ]
        self._health = Health(targets, tell=self.tell_ready, **times)

    def last_used(self) -> float:
        """Return the Unix time of the last request of a client through the front."""
        assert self._sockets is not None, "NVIDIA's server has no front"
        return self._sockets.last_used()

    def tell_ready(self, is_ready: bool) -> None:
        """Have the front say whether the server is ready."""
        if self._front is not None and self._sockets is not None:
            self._front.send(Readiness(self._sockets.folder, is_ready))

    def _fault(self) -> str | None:
        if fault := crash_of(self.log_path) or self._stopped_process():
            return fault
        if self._front is not None and (status := self._front.poll()) is not None:
            return f"the front, which clients reach, ended with status {status}"
        try:
            lost = [name for name in self.models if not self.admin.is_model_ready(name)]
        except RefusalError as error:
            raise ConnectionError(str(error)) from error
        if lost:
            return self._lost() or "; ".join(f"model {name} is not ready" for name in lost)
        return self._health.failure() if self._health is not None else None

    def _stopped_process(self) -> str | None:
        """Return which process has been stopped too long; the supervisor sees those below it."""
        processes = {"the supervisor": self._process, "the front": self._front}
        for name, process in processes.items():
            if process is None:
                continue
            state, now = supervisor.process_state(process.pid), time.monotonic()
            if state is None or state.letter != "T":
                self._stopped_since.pop(name, None)
            elif now - self._stopped_since.setdefault(name, now) >= supervisor.STOPPED_LIMIT_S:
                limit_s = supervisor.STOPPED_LIMIT_S
                return f"{name}, process {process.pid}, has been stopped for {limit_s:g} s"
        return None

    def stop(self, *, drain_s: float = 30.0) -> None:
        """End the server and everything it started; running requests get `drain_s` to finish."""
        if self._health is not None:
            self._health.stop()
        super().stop(drain_s=drain_s)
        if self._front is not None and not self._has_successor:
            self._front.end()
        self._close_admin()
        self._held.close()

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _launch(self) -> ServerLog:
        if self.former is not None:
            self._wanted_ports = dict(self.former.ports)
        self._choose_ports()
        command, environment = self._command()
        self._spawn(command, segments=self._shm_prefix, env=environment)
        if self._sockets is not None and self.former is None:
            served = self._served(self._sockets)
            settings = FrontSettings(
                served, self.host, self.ports, self.access, self.openai, Path.cwd()
            )
            self._front = FrontProcess(settings, log_path=self.log_path)
        configs = Path(self._source).glob("*/config.pbtxt")  # none at a URL
        return ServerLog(self.log_path, (path.parent.name for path in configs))

    def _served(self, sockets: ServerSockets) -> Served:
        is_here = "://" not in self._source
        return Served(sockets.folder, Path(self._source).absolute() if is_here else None)

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line of this start, with new sockets, and its environment."""
        installation = find_triton(own_backends=not self.is_old)
        program = [*self.prefix, str(installation.program), *installation.arguments()]
        repository = self._held.enter_context(plain_folder(self._source))
        environment = installation.environment()
        if self.is_old:
            known = installation.known_options()
            options = old_server_options(repository, self.ports, host=self.host, known=known)
        else:
            self._sockets = new_sockets()
            self._held.callback(self._sockets.remove)
            environment[REPORTS_VARIABLE] = str(self._sockets.reports)
            configs = read_configs(Path(self._source)).values()
            completes = any(map(leaves_types_to_the_backend, configs))
            options = server_options(repository, self._sockets, completes_configs=completes)
        segments = f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}"
        return [*program, *options, segments], environment

    def can_have_a_successor(self) -> bool:
        """Return whether another server can take over: it has a front, and keeps no sessions."""
        return self._front is not None and not self._has_sessions()

    def take_over(self) -> None:
        """Have the front of the former server pass requests on to this one, which is ready.

        The former one finishes the requests that it has; `stop` waits for them. Raises
        ServerStartError if the front cannot serve this one; it stays with the former.
        """
        former, sockets = self.former, self._sockets
        assert former is not None
        assert former._front is not None
        assert sockets is not None
        front = former._front
        front.send(Readiness(sockets.folder, is_ready=True))
        front.send(self._served(sockets))
        deadline = time.monotonic() + _TAKE_OVER_S
        while not front.serves(sockets.folder):
            if front.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(
                    "the front did not take the new server:", reasons=[], log_path=former.log_path
                )
            time.sleep(_POLL_S)
        self._front, self.former = front, None
        former._has_successor = True

    def _await_ready(
        self,
        log: ServerLog,
        deadline: float,
        timeout_s: float,
        progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        while True:
            check()
            status = self.poll()
            crash = crash_of(self.log_path, status)  # it may hang while it reports that
            events = log.read()
            if crash or status is not None:
                events += log.read()  # the last record is whole
            for message in events:
                progress(message)
            if crash:
                self._fail(f"{crash} before it was ready:", log.failures, is_crash=not log.failures)
            if status is not None:
                self._fail(
                    f"tritonserver ended with status {status} before it was ready:", log.failures
                )
            if self._front is not None and self._front.poll() is not None:
                self._fail("the front, which clients reach, did not start:", log.failures)
            if log.failures:
                self._fail("tritonserver cannot serve this repository:", log.failures)
            if self._is_ready(log):
                # A model's problems, and that it is loaded, are logged before it is ready.
                for message in (*log.read(), *log.read()):
                    progress(message)
                if not log.failures and self._is_seen_ready():
                    return progress("ready")
            if time.monotonic() > deadline:
                waiting = [name for name in log.loading if name not in log.loaded]
                log.failures.append(
                    f"still loading {', '.join(waiting)}" if waiting else "no model is loading"
                )
                self._fail(f"tritonserver was not ready after {timeout_s:g} s:", log.failures)
            time.sleep(_POLL_S)

    def _is_ready(self, log: ServerLog) -> bool:
        try:
            statuses = self.admin.statuses()
            failed = [each for each in statuses if each.state == "UNAVAILABLE"]
            # An ensemble fails because of another model: causes first.
            failed.sort(key=lambda each: "depend" in each.reason)
            log.failures += [f"model {each.name}: {short_reason(each.reason)}" for each in failed]
            if failed or any(each.state != "READY" for each in statuses):
                return False
            if not self.admin.is_ready() or not self._listens():
                return False
        except (OSError, RefusalError):
            self._close_admin()  # a channel that was refused may wait for seconds
            return False
        sockets = self._sockets
        if self._front and sockets and not self._front.serves(sockets.folder):
            return False
        if not statuses:
            log.failures.append(f"{self._source} holds no model")
            return False
        self.models = tuple(sorted(each.name for each in statuses))
        return True

    def _listens(self) -> bool:
        """Return whether HTTP and metrics are there too; gRPC listens before them."""
        addresses: list[str | tuple[str, int]]
        if self._sockets is None:
            addresses = [(self.connect_host, self.ports[name]) for name in ("http", "metrics")]
        else:
            addresses = [str(self._sockets.http), str(self._sockets.metrics)]
        return all(map(accepts_connections, addresses))

    def _is_seen_ready(self) -> bool:
        """Have the front report that the server is ready; return whether clients see that.

        Not earlier: tritonserver is ready by gRPC before it listens for HTTP, and both are ready
        before OpenAI's port is open.
        """
        if self._front is None:
            return True
        self.tell_ready(True)
        try:
            status, _ = self.ask(READY_PATH, timeout_s=1.0)
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _has_sessions(self) -> bool:
        """Return whether clients may hold sessions, whose turns the server takes to the end."""
        try:
            return any(is_interactive(self.admin.config(name)) for name in self.models)
        except (OSError, RefusalError):
            return False

    def _drain(self, deadline: float) -> None:
        """Have the server end; wait until it has, or until its log shows that no request needs it.

        tritonserver is asked to end only once the front has answered its requests: it would refuse
        the steps of ensembles that have begun, and never end their streams (2.51).
        """
        if not self._has_sessions():
            self._finish_requests(deadline)
        self._order(supervisor.END)
        while time.monotonic() < deadline and not self._ended_within(_POLL_S):
            tail = last_lines(self.log_path, 5)
            if any(_DRAINED in line for line in tail):
                return
            if any(_UNLOADING in line for line in tail):
                deadline = min(deadline, time.monotonic() + _UNLOAD_S)

    def _finish_requests(self, deadline: float) -> None:
        """Wait until the front, which takes no more for this server, has answered its requests."""
        front, sockets = self._front, self._sockets
        if front is None or sockets is None:
            return
        if not self._has_successor:
            front.terminate()
        while front.serves(sockets.folder) and time.monotonic() < deadline:
            if self._ended_within(_POLL_S):
                return
