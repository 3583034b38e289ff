"""The owner's side of a repository's server: start, watch, reload and stop it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inference.front.access import OpenAIOptions
from inference.front.link import (
    WITH_ENGINE,
    CanaryTimes,
    HostSettings,
    Reload,
    TritonOptions,
)
from inference.server.process import ServedProcess, kill
from inference.server.processes import ServerWatch, descendants, process_state
from inference.system.parent_process import LinkedProcess, checkout_program
from inference.system.process_memory import memory_variables

_PROGRAM = checkout_program("inference.host.__main__")
_POLL_S = 0.02
NEXT_LOG = ".next.log"  # suffix of a standby process's log
_END_S = 5.0  # for a killed process to end
_LAST_S = 0.5  # for a server that has lost a process to send its last answers


@dataclass(eq=False)
class ModelServer(ServedProcess):
    """A process that serves a repository, with the processes that it starts.

    Attributes:
        prefix: command prefix of a tritonserver, such as mpirun.
        has_triton: a tritonserver runs the models instead of this project's own engines.
        has_nvidia_backend: the tritonserver uses NVIDIA's C++ backend.
        openai: options of an endpoint for OpenAI's protocol, None for no endpoint.
        canaries: interval and timeout of the small requests to each model of a ready server.
        standby: a process that the previous server has `prepared`.
    """

    model_repository: Path | str
    _: KW_ONLY
    openai: OpenAIOptions | None = None
    has_triton: bool = False
    has_nvidia_backend: bool = False
    prefix: Sequence[str] = ()
    canaries: CanaryTimes = field(default_factory=CanaryTimes)
    standby: LinkedProcess | None = None

    name = "the server"
    # Set when the server is started.
    _link: HostLink = field(init=False)
    _watch: ServerWatch | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.openai is not None:
            self.ports = {**self.ports, "openai": self.openai.port}
        super().__post_init__()

    @property
    def openai_url(self) -> str | None:
        """Base URL of OpenAI's protocol for clients on this machine, None without it."""
        if "openai" not in self.ports:
            return None
        scheme = "https" if self.uses_tls else "http"
        return f"{scheme}://{self.address('openai')}/v1"

    def _launch(self) -> None:
        process = self._process = self._usable_standby() or self._start_idle(self.log_path)
        self._link, self._watch = HostLink(process.link), ServerWatch(process.pid)
        triton = TritonOptions(
            self.log_path.absolute(), tuple(self.prefix), self.has_nvidia_backend
        )
        settings = HostSettings(
            self._source(),
            triton if self.has_triton else None,
            self.host,
            self.ports,
            self.access,
            self.openai,
            self.canaries,
        )
        self._link.send(settings)

    def prepared(self, env: Mapping[str, str]) -> LinkedProcess:
        """Return a standby process for the next start, with additional variables.

        It imports what the server and its engine need, then waits for its settings.
        """
        return self._start_idle(self._next_log, env)

    def _start_idle(self, log_path: Path, env: Mapping[str, str] | None = None) -> LinkedProcess:
        words = [str(self.model_repository), *([] if self.has_triton else [WITH_ENGINE])]
        return self._start_process(
            _PROGRAM, words, log_path=log_path, env={**memory_variables(), **(env or {})}
        )

    @property
    def _next_log(self) -> Path:
        return self.log_path.with_suffix(NEXT_LOG)

    def _usable_standby(self) -> LinkedProcess | None:
        if self.standby is None:
            return None
        states = map(process_state, (self.standby.pid, *descendants(self.standby.pid)))
        if any(state is None or state.letter in "TZX" for state in states):  # stopped, or ended
            return None
        self._next_log.replace(self.log_path)
        return self.standby

    def _source(self) -> str:
        text = str(self.model_repository)
        return text if "://" in text else str(Path(text).absolute())

    def _starting(self, progress: Callable[[str], None]) -> Iterator[Sequence[str]]:
        link = self._link
        while not link.models:
            if (status := self.poll()) is not None:
                link.read_all()
            for line in link.progress_lines():
                progress(line)
            if "failures" in link.news:
                self._fail("the server cannot serve this repository:", link.news["failures"])
            if status is not None:
                self._fail(f"the server ended with status {status} before it was ready:")
            yield link.still_loading()
            link.wait(_POLL_S)
        self.models = link.models
        progress("ready")

    def identity(self, model: str) -> dict[str, str]:
        """Return which checkpoint a ready model serves, see `served_identity`; {} if unknown."""
        return dict(self._link.news["models"][model])

    def last_used(self) -> float:
        """Return the Unix time of the last request of a client."""
        return float(self._link.news["used"])

    def reload(
        self,
        *,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        repository: Path | str | None = None,
        exchanges: bool = False,
    ) -> None:
        """Serve a repository as it is now, None for the current one; running requests finish first.

        With `exchanges` the running engines load its weights, and new requests are refused until
        then; without, new engines are started while the old ones keep serving.

        Raises ValueError if it cannot be served; the server then keeps serving the old repository,
        unless an exchange has failed, which ends it.
        """
        link = self._link
        link.news |= {"models": {}, "kept": ""}
        self.model_repository = repository or self.model_repository
        link.send(Reload(self._source(), exchanges))
        deadline = time.monotonic() + timeout_s
        try:
            while not link.models:
                check()
                kept = link.news["kept"]
                if kept or self.poll() is not None or time.monotonic() > deadline:
                    raise ValueError(kept or "the server did not load the new repository")
                link.wait(_POLL_S)
        finally:
            self.models = link.models or self.models

    def _await_last_answers(self) -> None:
        lost = None if self._watch is None else self._watch.lost
        if lost is not None and self.pid not in lost:
            kill(lost)
            self.ended_within(_LAST_S)

    def _fault(self) -> str | None:
        assert self._watch is not None, "the server has been started"
        return self._watch.loss()

    def _lost(self) -> str:
        if self.poll() is not None:
            self._link.read_all()
        return str(self._link.news.get("lost", ""))


class HostLink:
    """The owner's end of the connection to a server: sends orders and receives news.

    Attributes:
        news: the latest news by key, see `inference.front.link`.
    """

    def __init__(self, connection: Connection) -> None:
        self.news: dict[str, Any] = {"models": {}, "used": time.time()}
        self._connection = connection
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._loading: list[str] = []
        self._reader = threading.Thread(target=self._read, name="host", daemon=True)
        self._reader.start()

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the served models; empty before they are ready."""
        return tuple(sorted(self.news["models"]))

    def send(self, record: object) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # the server has ended; its exit status is checked later
            self._connection.send(record)

    def read_all(self) -> None:
        """Read the remaining news of a server that has ended."""
        self._reader.join(_END_S)

    def wait(self, limit_s: float) -> None:
        """Wait for news, at most `limit_s`."""
        with self._changed:
            self._changed.wait(limit_s)

    def progress_lines(self) -> list[str]:
        """Return the progress lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def still_loading(self) -> list[str]:
        """Return a line that names the models still loading, for a start that has timed out."""
        return [f"still loading {', '.join(self._loading)}"] if self._loading else []

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                news = json.loads(self._connection.recv_bytes())
                with self._changed:
                    if "says" in news:
                        self._add_line(news["says"])
                    self.news |= news
                    self._changed.notify_all()

    def _add_line(self, line: str) -> None:
        does, _, model = line.partition(" ")
        if does == "loading":
            self._loading.append(model)
        elif model in self._loading:
            self._loading.remove(model)
        # While others are still loading, show those rather than the model that has loaded.
        self._lines.append(f"loading {', '.join(self._loading)}" if self._loading else line)
