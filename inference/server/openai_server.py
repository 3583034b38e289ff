"""A server of OpenAI's protocol by another engine: start it, wait for it, watch it, stop it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from inference.ports import pick_free_ports, ports_problems
from inference.server import supervisor
from inference.server.server_log import LOG_TAIL_LINES, ServerStartError, errors_of, last_lines

HOST_FIELD, PORT_FIELD, MODEL_FIELD = "{host}", "{port}", "{model}"  # in a command
_POLL_S = 0.25
_ASK_S = 5.0
_FIRST_ANSWER_S = 120.0  # kernels may be compiled for it
_KILL_WAIT_S = supervisor.LEFTOVER_GRACE_S + 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_NO_SEGMENTS = f"{supervisor.user_prefix()}none-"  # such a server's shared memory is its own


class OpenAIServer:
    """A process that serves OpenAI's protocol, and the processes that it starts.

    The fields {host}, {port} and {model} of its command are filled in. Port 0 is chosen when the
    server starts; `port` then holds the real one.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        model: str,
        host: str,
        port: int,
        log_path: Path,
        env: Mapping[str, str],
        folder: Path | None = None,
        uses_tls: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing is started before `start`.

        Args:
            command: Program and arguments.
            model: Name of the model in requests.
            host: Address to listen on.
            port: Port to listen on.
            log_path: Receives the server's output.
            env: Added to this process's environment.
            folder: The model's folder, for {model}.
            uses_tls: Whether the server listens with TLS.
            headers: Those that authorize a request.
        """
        self.host = host
        self.port = port
        self.log_path = log_path
        self._command = tuple(command)
        self._model = model
        self._env = dict(env)
        self._folder = folder
        self._uses_tls = uses_tls
        self._headers = dict(headers or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._silent_since: float | None = None

    @property
    def connect_host(self) -> str:
        """Address at which this machine reaches the server."""
        return _WILDCARDS.get(self.host, self.host)

    @property
    def name(self) -> str:
        """The program, for messages."""
        return Path(self._command[0]).name

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server and return once it has answered a small request.

        `check` is called repeatedly; an exception that it raises ends the start.

        Raises:
            ServerStartError: the port is taken, the server ended, or time ran out.
        """
        assert self._process is None, "a server object can be started once"
        problems = ports_problems(self.host, {"http": self.port}, keys={"http": "deploy.http_port"})
        if problems:
            raise ServerStartError(
                f"{self.name} was not started:", reasons=problems, log_path=self.log_path
            )
        self.port = self.port or pick_free_ports(self.host, 1)[0]
        deadline = time.monotonic() + timeout_s
        try:
            self._spawn()
            progress(f"waiting for {self.name}")
            while not self._is_healthy():
                check()
                self._fail_if_ended("before it was ready")
                if time.monotonic() > deadline:
                    self._fail(f"{self.name} was not ready after {timeout_s:g} s:")
                time.sleep(_POLL_S)
            progress("sending a first request")
            self._ask_once()
        except BaseException:
            self.stop(drain_s=0)
            raise

    def poll(self) -> int | None:
        """Return the exit status (128 + n after signal n), or None while the server runs."""
        return self._process.poll() if self._process else None

    def failure(self, *, patience_s: float = 0.0) -> str | None:
        """Return why a started server no longer serves, None while it does.

        A server that runs but does not answer, such as one that is very busy, gets `patience_s`.
        """
        if (status := self.poll()) is not None:
            return f"{self.name} ended with status {status}"
        if self._is_healthy():
            self._silent_since = None
            return None
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since < patience_s:
            return None
        return f"{self.name} does not answer on {self.connect_host}:{self.port}"

    def stop(self, *, drain_s: float = 30.0) -> None:
        """End the server and all that it started; running requests get `drain_s` to finish."""
        if self._process is None:
            return
        if self._process.poll() is None and drain_s > 0:
            self._process.terminate()
            self._ended_within(drain_s)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._ended_within(_KILL_WAIT_S)
        if self._process.poll() is None:
            for pid in [*supervisor.descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def can_have_a_successor(self) -> bool:
        """Return False: another engine's server holds its port until it ends."""
        return False

    def log_tail(self) -> list[str]:
        """Return the last lines of the server's log."""
        return last_lines(self.log_path, LOG_TAIL_LINES)

    def __enter__(self) -> OpenAIServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(drain_s=30.0 if error is None else 0)

    def _spawn(self) -> None:
        values = {HOST_FIELD: self.host, PORT_FIELD: str(self.port), MODEL_FIELD: str(self._folder)}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        lifeline, self._lifeline = os.pipe()
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", supervisor.__file__, str(lifeline), _NO_SEGMENTS),
                        *(_filled(word, values) for word in self._command),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self._env,
                    pass_fds=[lifeline],
                    start_new_session=True,
                )
        finally:
            os.close(lifeline)

    def _is_healthy(self) -> bool:
        """Return whether /health, or the list of models of a server without it, answers."""
        try:
            status = self._request("GET", "/health")[0]
            if status == http.HTTPStatus.NOT_FOUND:
                status = self._request("GET", "/v1/models")[0]
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK

    def _ask_once(self) -> None:
        """Send a request for one token; a server without completions is asked for nothing."""
        body = {"model": self._model, "prompt": "The", "max_tokens": 1}
        try:
            status, answer = self._request("POST", "/v1/completions", body, _FIRST_ANSWER_S)
        except (OSError, http.client.HTTPException) as error:
            self._fail_if_ended("at its first request")
            self._fail(f"{self.name} is ready, but does not answer: {error!r}")
        if status not in (http.HTTPStatus.OK, http.HTTPStatus.NOT_FOUND):
            text = answer.decode("utf-8", "replace")
            self._fail(f"{self.name} is ready, but refuses a request with status {status}: {text}")

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = _ASK_S,
    ) -> tuple[int, bytes]:
        connection = self._connection(timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"content-type": "application/json", **self._headers}
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, response.read(1000)
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if not self._uses_tls:
            return http.client.HTTPConnection(self.connect_host, self.port, timeout=timeout_s)
        # This machine's own process, by address: its certificate names the host for clients.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(
            self.connect_host, self.port, timeout=timeout_s, context=context
        )

    def _fail_if_ended(self, when: str) -> None:
        if (status := self.poll()) is not None:
            self._fail(f"{self.name} ended with status {status} {when}:")

    def _fail(self, summary: str) -> None:
        reasons = errors_of(last_lines(self.log_path, 200))
        raise ServerStartError(summary, reasons=reasons, log_path=self.log_path)

    def _ended_within(self, limit_s: float) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)


def _filled(word: str, values: Mapping[str, str]) -> str:
    for field, value in values.items():
        word = word.replace(field, value)
    return word
