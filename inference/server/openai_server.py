"""A server of OpenAI's protocol by another engine: start it, wait for it, watch it, stop it."""

import http.client
import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from pathlib import Path

from inference.server import supervisor
from inference.server.process import ServedProcess

HOST_FIELD, PORT_FIELD, MODEL_FIELD = "{host}", "{port}", "{model}"  # in a command
_POLL_S = 0.25
_GRACE_S = 5.0  # between SIGTERM and SIGKILL once this process is gone
_ASK_S = 5.0
_PATIENCE_S = 30.0  # with one that runs and does not answer
_FIRST_ANSWER_S = 120.0  # kernels may be compiled for it


@dataclass(eq=False)
class OpenAIServer(ServedProcess):
    """A process that serves OpenAI's protocol, and the processes that it starts.

    Attributes:
        command: in which the fields {host}, {port} and {model} are filled in.
        model: that requests name.
        folder: of the model.
    """

    command: Sequence[str]
    _: KW_ONLY
    model: str
    folder: Path

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = Path(self.command[0]).name
        tokens = self.access.tokens()
        self._headers = {"authorization": f"Bearer {tokens[0]}"} if tokens else {}
        self._silent_since: float | None = None

    def _launch(self) -> None:
        command, port, folder = list(self.command), str(self.ports["http"]), str(self.folder)
        values = {HOST_FIELD: self.host, PORT_FIELD: port, MODEL_FIELD: folder}
        for field, value in values.items():
            command = [word.replace(field, value) for word in command]
        self._process = self._started(supervisor.PROGRAM, ["", f"{_GRACE_S:g}", *command])

    def _starting(self, progress: Callable[[str], None]) -> Iterator[Sequence[str]]:
        progress(f"waiting for {self.name}")
        while not self._is_healthy():
            self._fail_if_ended("before it was ready")
            yield ()
            time.sleep(_POLL_S)
        progress("sending a first request")
        self._ask_once()

    def ask(
        self,
        path: str,
        *,
        timeout_s: float,
        body: Mapping[str, object] | None = None,
    ) -> tuple[int, bytes]:
        """Ask the server over HTTP, by POST where there is a body.

        Its certificate, which names the host for clients, is not checked. Returns the status and
        the first bytes of the answer. Raises OSError if there is none; a wrong one is a
        ConnectionError.
        """
        address = self.connect_host, self.ports["http"]
        connection = http.client.HTTPConnection(*address, timeout=timeout_s)
        if self.uses_tls:
            unchecked = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(*address, timeout=timeout_s, context=unchecked)
        try:
            data = None if body is None else json.dumps(body).encode()
            headers = {"content-type": "application/json", **self._headers}
            connection.request("GET" if body is None else "POST", path, data, headers)
            response = connection.getresponse()
            return response.status, response.read(1000)
        except http.client.HTTPException as error:
            raise ConnectionError(repr(error)) from error
        finally:
            connection.close()

    def _fault(self) -> str | None:
        """Return that the server does not answer; one that is very busy gets some time."""
        if self._is_healthy():
            self._silent_since = None
            return None
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since < _PATIENCE_S:
            return None
        where = self.address("http")
        return f"{self.name} does not answer on {where}: neither /health nor /v1/models"

    def _is_healthy(self) -> bool:
        """Return whether /health, or the list of models of a server without it, answers."""
        try:
            status, _ = self.ask("/health", timeout_s=_ASK_S)
            if status == HTTPStatus.NOT_FOUND:
                status, _ = self.ask("/v1/models", timeout_s=_ASK_S)
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _ask_once(self) -> None:
        """Send a request for one token; a server without completions is asked for nothing."""
        body = {"model": self.model, "prompt": "The", "max_tokens": 1}
        try:
            status, answer = self.ask("/v1/completions", timeout_s=_FIRST_ANSWER_S, body=body)
        except OSError as error:
            self._fail_if_ended("at its first request")
            self._fail(f"{self.name} is ready, but does not answer: {error!r}")
        if status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            text = answer.decode("utf-8", "replace")
            self._fail(f"{self.name} is ready, but refuses a request with status {status}: {text}")

    def _fail_if_ended(self, when: str) -> None:
        if (status := self.poll()) is not None:
            self._fail(f"{self.name} ended with status {status} {when}:")
