"""A server of OpenAI's protocol by another engine: start it, wait for it, watch it, stop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

from inference.server.process import ServedProcess, ask_locally

HOST_FIELD, PORT_FIELD, MODEL_FIELD = "{host}", "{port}", "{model}"  # in a command
_POLL_S = 0.25
_ASK_S = 5.0
_FIRST_ANSWER_S = 120.0  # kernels may be compiled for it


class OpenAIServer(ServedProcess):
    """A process that serves OpenAI's protocol, and the processes that it starts.

    The fields {host}, {port} and {model} of its command are filled in.
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
        """Prepare to run `command` for requests to `model`, whose folder is `folder`.

        `headers` authorize a request; `env` is added to this process's environment.
        """
        keys = {"http": "deploy.http_port"}
        super().__init__(
            host=host, ports={"http": port}, log_path=log_path, env=env, port_keys=keys
        )
        self.name = Path(command[0]).name
        self._command = tuple(command)
        self._model = model
        self._folder = folder
        self._uses_tls = uses_tls
        self._headers = dict(headers or {})

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
        self._check_ports()
        self._choose_ports()
        deadline = time.monotonic() + timeout_s
        try:
            values = {
                HOST_FIELD: self.host,
                PORT_FIELD: self.ports["http"],
                MODEL_FIELD: self._folder,
            }
            command = list(self._command)
            for field, value in values.items():
                command = [word.replace(field, str(value)) for word in command]
            self._spawn(command, segments="", env={})
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

    def failure(self, *, patience_s: float = 0.0) -> str | None:
        """Return why a started server no longer serves, None while it does.

        A server that runs but does not answer, such as one that is very busy, gets `patience_s`.
        """
        if (status := self.poll()) is not None:
            return f"{self.name} ended with status {status}"
        if self._is_healthy():
            self._silent_since = None
        elif self._is_silent(patience_s):
            return f"{self.name} does not answer on {self.address('http')}"
        return None

    def _is_healthy(self) -> bool:
        """Return whether /health, or the list of models of a server without it, answers."""
        try:
            status, _ = self._ask("/health")
            if status == HTTPStatus.NOT_FOUND:
                status, _ = self._ask("/v1/models")
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _ask_once(self) -> None:
        """Send a request for one token; a server without completions is asked for nothing."""
        body = {"model": self._model, "prompt": "The", "max_tokens": 1}
        try:
            status, answer = self._ask("/v1/completions", body, _FIRST_ANSWER_S)
        except OSError as error:
            self._fail_if_ended("at its first request")
            self._fail(f"{self.name} is ready, but does not answer: {error!r}")
        if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            text = answer.decode("utf-8", "replace")
            self._fail(f"{self.name} is ready, but refuses a request with status {status}: {text}")

    def _ask(
        self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = _ASK_S
    ) -> tuple[int, bytes]:
        return ask_locally(
            self.connect_host,
            self.ports["http"],
            path,
            timeout_s=timeout_s,
            uses_tls=self._uses_tls,
            body=body,
            headers=self._headers,
        )

    def _fail_if_ended(self, when: str) -> None:
        if (status := self.poll()) is not None:
            self._fail(f"{self.name} ended with status {status} {when}:")
