"""A server of OpenAI's protocol by another engine: start it, wait for it, watch it, stop it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from pathlib import Path

from inference.server import supervisor
from inference.server.process import ServedProcess

HOST_FIELD, PORT_FIELD, MODEL_FIELD = "{host}", "{port}", "{model}"  # in a command
_POLL_S = 0.25
_GRACE_S = 5.0  # between SIGTERM and SIGKILL once this process is gone
_ASK_S = 5.0
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
        if tokens:
            self._headers = {"authorization": f"Bearer {tokens[0]}"}

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server and return once it has answered a small request.

        `check` is called repeatedly; an exception that it raises ends the start. Raises
        ServerStartError if the port is taken, the server ended, or time ran out.
        """
        self._check_ports()
        self._choose_ports()
        deadline = time.monotonic() + timeout_s
        try:
            command, port, folder = list(self.command), str(self.ports["http"]), str(self.folder)
            values = {HOST_FIELD: self.host, PORT_FIELD: port, MODEL_FIELD: folder}
            for field, value in values.items():
                command = [word.replace(field, value) for word in command]
            self._start_process(supervisor.PROGRAM, ["", f"{_GRACE_S:g}", *command])
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

    def _fault(self) -> None:
        if not self._is_healthy():
            raise ConnectionError("neither /health nor /v1/models")

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
