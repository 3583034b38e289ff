"""One tritonserver process: start it, wait until it is ready, watch it, stop all of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from inference.front.access import OPEN_ACCESS, Access
from inference.front.openai.options import OpenAIOptions
from inference.front.sockets import ServerSockets, new_sockets
from inference.plain_path import PlainFolder
from inference.ports import TRITON_PORTS, accepts_connections, pick_free_ports, ports_problems
from inference.server import supervisor
from inference.server.admin import Admin, ModelStatus, RefusalError, is_interactive
from inference.server.health import INTERVAL_S, TIMEOUT_S, Health, front_target, model_targets
from inference.server.installation import find_triton
from inference.server.options import (
    leaves_types_to_the_backend,
    old_server_options,
    server_options,
)
from inference.server.server_log import (
    CRASH_SIGNALS,
    LOG_TAIL_LINES,
    ServerLog,
    ServerStartError,
    crash_message,
    crash_of,
    errors_of,
    last_lines,
    losses_of,
    put_aside,
)
from inference.supervision import SUPERVISED_VARIABLE

__all__ = ["ModelStatus", "ServerStartError", "TritonServer"]

PORT_NAMES = ("http", "grpc", "metrics")
_POLL_S = 0.1
_KILL_WAIT_S = supervisor.LEFTOVER_GRACE_S + 5.0
_OPENAI = "openai"
_TAKE_OVER_S = 60.0  # the front loads the new server's tokenizer
_FRONT_WAIT_S = 5.0  # for the last answers to be sent
_UNLOADING = "live models and "  # logged every second once all requests are answered
_DRAINED = "Found 0 live models"  # what remains is closing idle connections, which takes seconds
# Server 2.51 never unloads a model if the last frame of one of its streams was on the way when the
# client cancelled: the stream keeps the request, and the request the model.
_UNLOAD_S = 10.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class TritonServer:
    """One tritonserver process, its child processes, and the front that clients reach.

    Ports of 0 are chosen when the server starts; `http_port`, `grpc_port` and `metrics_port` then
    hold the real ones. `port_keys` gives the configuration key of each port ("http", "grpc",
    "metrics") for messages. `env` is added to this process's environment. `prefix` starts the
    server, such as mpirun. `access` limits the clients and their requests. `is_old` keeps to the
    options that every release knows: the server then listens itself, without a front, and leaves
    the control of models open to clients. The server runs in `work_dir`. `openai` adds an
    endpoint of OpenAI's protocol, which needs the front's sockets. A server with a `former` one
    gets its front and ports by `take_over`.
    """

    def __init__(
        self,
        model_repository: Path | str,
        *,
        http_port: int = TRITON_PORTS["http"],
        grpc_port: int = TRITON_PORTS["grpc"],
        metrics_port: int = TRITON_PORTS["metrics"],
        host: str = "127.0.0.1",
        log_path: Path,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        port_keys: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        is_old: bool = False,
        work_dir: Path | None = None,
        access: Access = OPEN_ACCESS,
        openai: OpenAIOptions | None = None,
        former: TritonServer | None = None,
    ) -> None:
        self.model_repository = str(model_repository)
        self._repository = PlainFolder(self.model_repository)
        self.host = host
        self.log_path = Path(log_path)
        self.models: tuple[str, ...] = ()
        self._wanted_ports = dict(
            zip(PORT_NAMES, (http_port, grpc_port, metrics_port), strict=True)
        )
        assert openai is None or not is_old, "the endpoint needs the front's sockets"
        self._openai_options = openai
        if openai is not None:
            self._wanted_ports[_OPENAI] = openai.port
        self._ports = self._wanted_ports
        self._port_keys = {name: f"{name}_port" for name in self._wanted_ports}
        self._port_keys |= dict(port_keys or {})
        self._env = dict(env or {})
        self._extra_args = tuple(extra_args)
        self._prefix = tuple(prefix)
        self._is_old = is_old
        self._work_dir = work_dir
        self._silent_since: float | None = None
        self._stopped_since: dict[str, float] = {}  # by process
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._admin: Admin | None = None
        self._health: Health | None = None
        # Prefix of the server's segments in /dev/shm, by which those of a killed server are found.
        self._shm_prefix = f"{supervisor.user_prefix()}{secrets.token_hex(8)}-"
        self._access = access
        self._sockets: ServerSockets | None = None
        self._front: subprocess.Popen[bytes] | None = None
        self._former = former
        self._has_successor = False

    @property
    def http_port(self) -> int:
        """Port of HTTP requests and health checks."""
        return self._ports["http"]

    @property
    def grpc_port(self) -> int:
        """Port of gRPC requests."""
        return self._ports["grpc"]

    @property
    def metrics_port(self) -> int:
        """Port of the Prometheus metrics."""
        return self._ports["metrics"]

    @property
    def openai_port(self) -> int | None:
        """Port of the endpoint that speaks OpenAI's protocol, None without one."""
        return self._ports.get(_OPENAI)

    @property
    def openai_url(self) -> str | None:
        """Base URL of that endpoint for clients on this machine, None without one."""
        if self.openai_port is None:
            return None
        scheme = "http" if self._access.tls_cert is None else "https"
        return f"{scheme}://{_bracketed(self.connect_host)}:{self.openai_port}/v1"

    @property
    def http_url(self) -> str:
        """`host:port` for HTTP clients on this machine."""
        return f"{_bracketed(self.connect_host)}:{self.http_port}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of the metrics for clients on this machine."""
        return f"{_bracketed(self.connect_host)}:{self.metrics_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` for gRPC clients on this machine."""
        return f"{_bracketed(self.connect_host)}:{self.grpc_port}"

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, the root of this server's processes."""
        return self._process.pid if self._process else None

    @property
    def connect_host(self) -> str:
        """Address at which this machine reaches the server."""
        return _WILDCARDS.get(self.host, self.host)

    @property
    def control_address(self) -> str:
        """Target of gRPC at which the server answers only its owner.

        It offers all of Triton's API, including the loading and unloading of models.
        """
        return self.grpc_url if self._sockets is None else f"unix:{self._sockets.grpc}"

    @property
    def admin(self) -> Admin:
        """The owner's connection to a started server."""
        if self._admin is None:
            self._admin = Admin(self.control_address)
        return self._admin

    def port_problems(self) -> list[str]:
        """Return a message for every wanted port that is unavailable."""
        if self._former is not None:
            return []
        return ports_problems(self.host, self._wanted_ports, keys=self._port_keys)

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None] | None = None,
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
        assert self._process is None, "a server object can be started once"
        if problems := self.port_problems():
            raise ServerStartError(
                "tritonserver was not started:", reasons=problems, log_path=self.log_path
            )
        deadline = time.monotonic() + timeout_s
        # Another process can take a chosen port before the server opens it.
        for attempts_left in (2, 1, 0):
            log = self._spawn()
            try:
                self._await_ready(log, deadline, timeout_s, progress or _silent, check)
            except BaseException as error:
                self.stop(drain_s=0)
                if not (isinstance(error, ServerStartError) and attempts_left):
                    raise
                if error.is_crash and crash_retries:
                    crash_retries -= 1
                    kept = put_aside(self.log_path)
                    sys.stderr.write(f"{error.summary} starting it again; its log is {kept}\n")
                elif not (0 in self._wanted_ports.values() and log.port_was_taken()):
                    raise
            else:
                assert self._process is not None
                self._process.send_signal(signal.SIGUSR1)
                return

    def watch_answers(
        self,
        *,
        hidden: int | None = None,
        interval_s: float = INTERVAL_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Make `failure` report models that are loaded but do not answer.

        Each idle model gets a small request now and then. `hidden` is the width of the hidden
        states that an encoder takes; an encoder of unknown width gets none. `interval_s` and
        `timeout_s` are those of `Health`.
        """
        if self._is_old:  # NVIDIA's backend would keep a canary waiting behind long requests
            return
        assert self._process is not None, "the server was not started"
        targets = model_targets(self.admin, self.models, root=self._process.pid, hidden=hidden)
        if self._front is not None:
            uses_tls, pid = self._access.tls_cert is not None, self._front.pid
            for name in ("http", _OPENAI):
                if port := self._ports.get(name):
                    at = f"the front at its port {port}"
                    targets.append(
                        front_target(at, self.connect_host, port, uses_tls=uses_tls, pid=pid)
                    )
        self._health = Health(
            targets,
            unready=None if self._sockets is None else self._sockets.unready,
            interval_s=interval_s,
            timeout_s=timeout_s,
        )
        self._health.start()

    def last_used(self) -> float:
        """Return the Unix time of the last request of a client through the front."""
        assert self._sockets is not None, "NVIDIA's server has no front"
        return self._sockets.last_used()

    def poll(self) -> int | None:
        """Return the exit status (128 + n after signal n), or None while the server runs."""
        return self._process.poll() if self._process else None

    def wait(self) -> int:
        """Block until the server ends and return its exit status."""
        assert self._process is not None, "the server was not started"
        return self._process.wait()

    def failure(self, *, patience_s: float = 0.0) -> str | None:
        """Return why a started server no longer serves all its models, None while it does.

        A server that runs but does not answer, such as one that is very busy, gets `patience_s`.
        """
        if (status := self.poll()) is not None:
            return "; ".join(losses_of(self.log_path)) or f"tritonserver ended with status {status}"
        if fault := crash_of(self.log_path) or self._stopped_process():
            return fault
        if self._front is not None and (status := self._front.poll()) is not None:
            return f"the front, which clients reach, ended with status {status}"
        try:
            lost = [name for name in self.models if not self.admin.is_model_ready(name)]
        except (OSError, RefusalError) as error:
            if losses := losses_of(self.log_path):  # the server is about to end
                return "; ".join(losses)
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since < patience_s:
                return None
            return f"tritonserver does not answer on {self.http_url}: {error}"
        self._silent_since = None
        if lost:
            return "; ".join(
                losses_of(self.log_path) or [f"model {name} is not ready" for name in lost]
            )
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
        if self._process is None:
            return
        if self._health is not None:
            self._health.stop()
        if self._process.poll() is None and drain_s > 0:
            deadline = time.monotonic() + drain_s
            if not self._has_sessions():
                self._finish_requests(deadline)
            self._process.terminate()
            self._drain(deadline)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.send_signal(signal.SIGCONT)  # it may have been stopped
            self._ended_within(_KILL_WAIT_S)
        if self._process.poll() is None:
            for pid in [*supervisor.descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._front is not None:
            if self._front.stdin is not None:
                self._front.stdin.close()  # it ends with its owner
            _end(self._front)
        self._close_admin()
        if self._sockets is not None:
            self._sockets.remove()
        self._repository.remove()

    def _close_admin(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def log_tail(self) -> list[str]:
        """Return the last lines of the server's log."""
        return last_lines(self.log_path, LOG_TAIL_LINES)

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(drain_s=30.0 if error is None else 0)

    def _spawn(self) -> ServerLog:
        if self._former is not None:
            self._wanted_ports = self._former._ports
        missing = [name for name, port in self._wanted_ports.items() if port == 0]
        chosen = zip(missing, pick_free_ports(self.host, len(missing)), strict=True)
        self._ports = self._wanted_ports | dict(chosen)
        command, environment = self._command()
        environment |= self._env | {SUPERVISED_VARIABLE: "1"}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        lifeline, self._lifeline = os.pipe()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", *self._supervisor(lifeline), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=self._work_dir,
                    pass_fds=[lifeline],
                    start_new_session=True,
                )
                if self._sockets is not None and self._former is None:
                    self._front = self._start_front(self._sockets, log)
        finally:
            os.close(lifeline)
        configs = Path(self.model_repository).glob("*/config.pbtxt")  # none at a URL
        return ServerLog(self.log_path, (path.parent.name for path in configs))

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line of this start, with new sockets, and its environment."""
        installation = find_triton(own_backends=not self._is_old)
        program = [*self._prefix, str(installation.program), *installation.arguments()]
        self._sockets = None if self._is_old else new_sockets()
        segments = f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}"
        command = [*program, *self._arguments(), segments, *self._extra_args]
        return command, os.environ | installation.environment()

    def _supervisor(self, lifeline: int) -> list[str]:
        return [supervisor.__file__, str(lifeline), self._shm_prefix]

    def _start_front(self, sockets: ServerSockets, log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start the process that clients reach; it ends with this one."""
        ports = [f"--{name}-port={port}" for name, port in self._ports.items()]
        where = [f"--sockets={sockets.folder}", f"--host={self.host}", *ports]
        if repository := self._local_repository():
            where.append(f"--repository={repository}")
        if self._openai_options is not None:
            where += self._openai_options.arguments()
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "inference.front", *where),
                *("--lifeline=0", *self._access.arguments()),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            # The checkout that this process runs, wherever it was started.
            cwd=Path(__file__).resolve().parents[2],
            start_new_session=True,
        )

    def _local_repository(self) -> str | None:
        if "://" in self.model_repository:
            return None
        return str(Path(self.model_repository).absolute())

    def can_have_a_successor(self) -> bool:
        """Return whether another server can take over: it has a front, and keeps no sessions."""
        return self._front is not None and not self._has_sessions()

    def take_over(self, *, timeout_s: float = _TAKE_OVER_S) -> None:
        """Have the front of the former server pass requests on to this one, which is ready.

        The former one finishes the requests that it has; `stop` waits for them.

        Raises:
            ServerStartError: The front cannot serve this one; it stays with the former.
        """
        former, sockets = self._former, self._sockets
        assert former is not None
        assert sockets is not None
        front = former._front
        assert front is not None
        assert front.stdin is not None
        order = {"sockets": str(sockets.folder), "repository": self._local_repository()}
        front.stdin.write(json.dumps(order).encode() + b"\n")
        front.stdin.flush()
        deadline = time.monotonic() + timeout_s
        while not sockets.listening.exists():
            if front.poll() is not None or time.monotonic() > deadline:
                raise ServerStartError(
                    "the front did not take the new server:", reasons=[], log_path=former.log_path
                )
            time.sleep(_POLL_S)
        self._front, former._front = front, None
        former._has_successor = True

    def _arguments(self) -> list[str]:
        if self._sockets is None:
            known = find_triton().known_options()
            return old_server_options(
                self._repository.path, self._ports, host=self.host, known=known
            )
        return server_options(
            self._repository.path,
            self._sockets,
            completes_configs=leaves_types_to_the_backend(self.model_repository),
        )

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
            status, crash = self.poll(), self._crash()
            events = log.read()
            if crash or status is not None:
                events += log.read()  # the last record is whole
            for message in events:
                progress(message)
            if crash:
                self._fail(f"{crash} before it was ready:", log, is_crash=not log.failures)
            if status is not None:
                self._fail(f"tritonserver ended with status {status} before it was ready:", log)
            if self._front is not None and self._front.poll() is not None:
                self._fail("the front, which clients reach, did not start:", log)
            if log.failures:
                self._fail("tritonserver cannot serve this repository:", log)
            if self._is_ready(log):
                # A model's problems, and that it is loaded, are logged before it is ready.
                for message in (*log.read(), *log.read()):
                    progress(message)
                if not log.failures:
                    return progress("ready")
                self._fail("tritonserver cannot serve this repository:", log)
            if time.monotonic() > deadline:
                waiting = [name for name in log.loading if name not in log.loaded]
                log.failures.append(
                    f"still loading {', '.join(waiting)}" if waiting else "no model is loading"
                )
                self._fail(f"tritonserver was not ready after {timeout_s:g} s:", log)
            time.sleep(_POLL_S)

    def _crash(self) -> str | None:
        """Return by which signal the program has crashed; it may hang while it reports that."""
        number = (self.poll() or 0) - 128
        return crash_message(number) if number in CRASH_SIGNALS else crash_of(self.log_path)

    def _is_ready(self, log: ServerLog) -> bool:
        try:
            statuses = self.admin.models()
            failed = [each for each in statuses if each.state == "UNAVAILABLE"]
            # An ensemble fails because of another model: causes first.
            failed.sort(key=lambda each: "depend" in each.reason)
            log.failures += [f"model {each.name}: {each.reason}" for each in failed]
            if failed or any(each.state != "READY" for each in statuses):
                return False
            if not self.admin.is_ready() or not self._listens():
                return False
        except (OSError, RefusalError):
            self._close_admin()  # after a refused connection gRPC waits, for seconds
            return False
        has_front = self._sockets is not None and self._former is None
        if has_front and self._sockets is not None and not self._sockets.listening.exists():
            return False
        if not statuses:
            log.failures.append(f"{self.model_repository} holds no model")
            return False
        self.models = tuple(sorted(each.name for each in statuses))
        return True

    def _listens(self) -> bool:
        """Return whether HTTP and metrics are there too; gRPC listens before them."""
        addresses: list[str | tuple[str, int]]
        if self._sockets is None:
            addresses = [(self.connect_host, self._ports[name]) for name in ("http", "metrics")]
        else:
            addresses = [str(self._sockets.http), str(self._sockets.metrics)]
        return all(map(accepts_connections, addresses))

    def _fail(self, summary: str, log: ServerLog, *, is_crash: bool = False) -> None:
        unique = list(dict.fromkeys(log.failures)) or errors_of(last_lines(self.log_path, 200))
        raise ServerStartError(summary, reasons=unique, log_path=self.log_path, is_crash=is_crash)

    def _has_sessions(self) -> bool:
        """Return whether clients may hold sessions, whose turns the server takes to the end."""
        try:
            return any(is_interactive(self.admin.config(name)) for name in self.models)
        except (OSError, RefusalError):
            return False

    def _finish_requests(self, deadline: float) -> None:
        """Let the front take no more requests and answer the running ones.

        tritonserver is asked to end only then: it would refuse the steps of ensembles that have
        begun, and never end their streams (2.51).
        """
        if self._front is not None:
            self._front.terminate()
        while self._passes_requests() and time.monotonic() < deadline:
            if self._ended_within(_POLL_S):
                return

    def _passes_requests(self) -> bool:
        """Return whether requests may still be under way between the front and the server."""
        if self._front is not None:
            return self._front.poll() is None
        if not self._has_successor or self._sockets is None:
            return False
        return self._sockets.listening.exists()

    def _drain(self, deadline: float) -> None:
        """Wait until the server has ended, or until its log shows that no request needs it."""
        while time.monotonic() < deadline and not self._ended_within(_POLL_S):
            tail = last_lines(self.log_path, 5)
            if any(_DRAINED in line for line in tail):
                return
            if any(_UNLOADING in line for line in tail):
                deadline = min(deadline, time.monotonic() + _UNLOAD_S)

    def _ended_within(self, limit_s: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process that was asked to stop, and kill it if necessary."""
    try:
        process.wait(_FRONT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _silent(_: str) -> None:
    """Report nothing."""
