"""A third-party server of OpenAI's protocol, such as vLLM: start it, watch it, stop it."""

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

HOST_FIELD, PORT_FIELD, MODEL_FIELD = "{host}", "{port}", "{model}"  # placeholders in a command
_POLL_S = 0.25
_GRACE_S = 5.0  # between SIGTERM and SIGKILL after this process has ended
_ASK_S = 5.0
_PATIENCE_S = 30.0  # after which a running server that does not answer has failed
_FIRST_ANSWER_S = 120.0  # the first request may compile kernels


@dataclass(eq=False)
class OpenAIServer(ServedProcess):
    """A process that serves OpenAI's protocol, with the processes that it starts.

    Attributes:
        command: its command, with the placeholders {host}, {port} and {model}.
        model: the model's name in requests.
        folder: the model's folder.
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
        self._process = self._start_process(supervisor.PROGRAM, ["", f"{_GRACE_S:g}", *command])

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
        """Send an HTTP request, a POST if there is a body; return status and first 1000 bytes.

        The server's certificate, which names the host for clients, is not verified. Raises OSError
        without an answer, ConnectionError if the answer is not HTTP.
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
        """Return an error if the server has not answered for 30 s; it may be busy before."""
        if self._is_healthy():
            self._silent_since = None
            return None
        self._silent_since = self._silent_since or time.monotonic()
        if time.monotonic() - self._silent_since < _PATIENCE_S:
            return None
        where = self.address("http")
        return f"{self.name} does not answer on {where}: neither /health nor /v1/models"

    def _is_healthy(self) -> bool:
        """Return whether /health answers, or /v1/models on a server without /health."""
        try:
            status, _ = self.ask("/health", timeout_s=_ASK_S)
            if status == HTTPStatus.NOT_FOUND:
                status, _ = self.ask("/v1/models", timeout_s=_ASK_S)
        except OSError:
            return False
        return status == HTTPStatus.OK

    def _ask_once(self) -> None:
        """Send a request for one token; a server without /v1/completions passes."""
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
