"""A server of a repository, as its owner sees it: start it, watch it, stop all of it."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from inference.front.access import OpenAIOptions
from inference.front.link import RELOAD, CanaryTimes, Event, HostSettings, TritonOptions
from inference.server.process import ServedProcess
from inference.server.processes import ServerWatch
from inference.system.process_memory import memory_variables

_PROGRAM = (sys.executable, "-m", "inference.host")
_CHECKOUT = Path(__file__).resolve().parents[2]
_POLL_S = 0.02
_END_S = 5.0  # for a process that was killed to go


@dataclass(eq=False)
class ModelServer(ServedProcess):
    """One process that serves a repository, and those that it starts.

    Attributes:
        prefix: of the command of a tritonserver, such as mpirun.
        has_triton: a tritonserver runs the models, in place of this project's own engines.
        is_nvidias: with NVIDIA's C++ backend.
        openai: adds an endpoint of OpenAI's protocol.
        canaries: how often each model gets a small request, once the server is ready.
    """

    model_repository: Path | str
    _: KW_ONLY
    openai: OpenAIOptions | None = None
    has_triton: bool = False
    is_nvidias: bool = False
    prefix: Sequence[str] = ()
    canaries: CanaryTimes = field(default_factory=CanaryTimes)

    name = "the server"

    def __post_init__(self) -> None:
        if self.openai is not None:
            self.ports = {**self.ports, "openai": self.openai.port}
        super().__post_init__()
        self._watch: ServerWatch | None = None
        self._link: HostLink | None = None

    @property
    def openai_url(self) -> str | None:
        """Base URL of OpenAI's protocol for clients on this machine, None without it."""
        if "openai" not in self.ports:
            return None
        scheme = "https" if self.uses_tls else "http"
        return f"{scheme}://{self.address('openai')}/v1"

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server and return once every model has answered a small request.

        `check` is called repeatedly; an exception that it raises ends the start. Raises
        ServerStartError: a port is taken, the server ended, a model failed or time ran out; no
        process is left then.
        """
        self._check_ports()
        self._choose_ports()
        try:
            self._launch()
            self._await_ready(time.monotonic() + timeout_s, timeout_s, progress, check)
        except BaseException:
            self.stop(drain_s=0)
            raise

    def _launch(self) -> None:
        # The folder is for the list of processes alone.
        process = self._start_process(
            _PROGRAM, [str(self.model_repository)], env=memory_variables(), cwd=_CHECKOUT
        )
        self._link = HostLink(process.link)
        triton = TritonOptions(self.log_path.absolute(), tuple(self.prefix), self.is_nvidias)
        settings = HostSettings(
            self._source(),
            triton if self.has_triton else None,
            self.host,
            self.ports,
            self.access,
            self.openai,
            Path.cwd(),
            self.canaries,
        )
        self._link.send(settings)

    def _source(self) -> str:
        text = str(self.model_repository)
        return text if "://" in text else str(Path(text).absolute())

    def _await_ready(
        self,
        deadline: float,
        timeout_s: float,
        progress: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        process, link = self._process, self._link
        assert process is not None
        assert link is not None
        while not link.models:
            check()
            if (status := process.poll()) is not None:
                link.read_all()
            for said in link.said():
                progress(said)
            if link.has_failed:
                self._fail("the server cannot serve this repository:", link.failures)
            if status is not None:
                self._fail(f"the server ended with status {status} before it was ready:")
            if time.monotonic() > deadline:
                self._fail(f"the server was not ready after {timeout_s:g} s:", link.loading())
            link.wait(_POLL_S)
        self.models = link.models
        self._watch = ServerWatch(process.pid)
        progress("ready")

    def last_used(self) -> float:
        """Return the Unix time of the last request of a client."""
        assert self._link is not None
        return self._link.used

    def reload(self, *, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Serve the repository as it is now; requests under way end where they began.

        Raises ValueError if it cannot be served; what was loaded is served on.
        """
        link = self._link
        assert link is not None
        link.models, link.kept = (), ""
        link.send(RELOAD)
        deadline = time.monotonic() + timeout_s
        try:
            while not link.models:
                check()
                if link.kept or self.poll() is not None or time.monotonic() > deadline:
                    raise ValueError(link.kept or "the server did not load the new repository")
                link.wait(_POLL_S)
        finally:
            link.models = link.models or self.models
        self.models = link.models

    def _fault(self) -> str | None:
        assert self._watch is not None
        return self._watch.loss()

    def _lost(self) -> str:
        if self._link is None:
            return ""
        if self.poll() is not None:
            self._link.read_all()
        return self._link.lost


class HostLink:
    """The owner's end of the connection to a server: orders there, events back.

    Attributes:
        models: those that are served, none before they are ready.
        has_failed: whether it cannot serve, and `failures` why, as far as it knows.
        lost: why it is about to end.
        kept: why it has not loaded another repository.
        used: Unix time of the last request.
    """

    def __init__(self, connection: Connection) -> None:
        self.models: tuple[str, ...] = ()
        self.failures: tuple[str, ...] = ()
        self.lost = self.kept = ""
        self.has_failed = False
        self.used = time.time()
        self._connection = connection
        self._changed = threading.Condition()
        self._said: list[str] = []
        self._loading: list[str] = []
        self._reader = threading.Thread(target=self._read, name="host", daemon=True)
        self._reader.start()

    def send(self, record: object) -> None:
        """Send an order."""
        with contextlib.suppress(OSError):  # its exit status reports its end
            self._connection.send(record)

    def read_all(self) -> None:
        """Read what a server that has ended has sent."""
        self._reader.join(_END_S)

    def wait(self, limit_s: float) -> None:
        """Wait for an event."""
        with self._changed:
            self._changed.wait(limit_s)

    def said(self) -> list[str]:
        """Return what the server has said since the last time."""
        said, self._said = self._said, []
        return said

    def loading(self) -> list[str]:
        """Return which models are loading, for a start that takes too long."""
        return [f"still loading {', '.join(self._loading)}"] if self._loading else []

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                word, _, about = self._connection.recv_bytes().decode().partition(" ")
                with self._changed:
                    self._take(Event(word), about)
                    self._changed.notify_all()

    def _take(self, event: Event, about: str) -> None:
        if event is Event.SAYS:
            does, _, model = about.partition(" ")
            if does == "loading":
                self._loading.append(model)
            elif model in self._loading:
                self._loading.remove(model)
            # A model that has loaded does not hide those that still load.
            self._said.append(f"loading {', '.join(self._loading)}" if self._loading else about)
        elif event is Event.READY:
            self.models = tuple(sorted(about.split(" ")))
        elif event is Event.USED:
            self.used = time.time()
        elif event is Event.FAILED:
            self.failures = tuple(json.loads(about))
            self.has_failed = True
        elif event is Event.LOST:
            self.lost = about
        elif event is Event.KEPT:
            self.kept = about
