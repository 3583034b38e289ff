"""Base class of server processes: ports, start and stop."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from inference.front.access import OPEN_ACCESS, Access
from inference.server.log import ServerStartError, last_lines
from inference.server.processes import descendants, is_running
from inference.system.parent_process import LinkedProcess
from inference.system.ports import TRITON_PORTS, free_ports, host_and_port, ports_problems

_END_S = 5.0  # for killed processes to end
_POLL_S = 0.02
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Log lines that a server marks as errors, and the last words of an uncaught C++ exception.
_ERROR = re.compile(r"E\d{4} |error: |terminate called ")
_Server = TypeVar("_Server", bound="ServedProcess")


@dataclass(kw_only=True, eq=False)
class ServedProcess:
    """A server that ends, with all processes that it starts, when this process ends.

    Attributes:
        ports: by name; a port of 0 is replaced by a free one at the start.
        env: variables to add to this process's environment.
        port_keys: configuration keys of the ports and of the host, for messages.
        access: limits and credentials for clients.
    """

    name = "the server"
    host: str = "127.0.0.1"
    ports: Mapping[str, int] = field(default_factory=TRITON_PORTS.copy)
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port_keys: Mapping[str, str] = field(default_factory=dict)
    access: Access = OPEN_ACCESS

    def __post_init__(self) -> None:
        self.models: tuple[str, ...] = ()
        self.uses_tls = self.access.tls_cert is not None
        self._wanted_ports = dict(self.ports)
        self._process: LinkedProcess | None = None

    @property
    def connect_host(self) -> str:
        """Address at which this machine reaches the server."""
        return _WILDCARDS.get(self.host, self.host)

    def address(self, port: str) -> str:
        """Return `host:port` for clients on this machine."""
        return host_and_port(self.connect_host, self.ports[port])

    @property
    def pid(self) -> int | None:
        """Process id of the root of this server's processes."""
        return self._process.pid if self._process else None

    def port_problems(self) -> list[str]:
        """Return a message for every unavailable port, or for a host that is not this machine."""
        keys = {name: f"{name}_port" for name in self.ports} | {"host": "host", **self.port_keys}
        return ports_problems(self.host, self._wanted_ports, keys=keys)

    def start(
        self,
        *,
        timeout_s: float,
        progress: Callable[[str], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the server; return once it has answered a small request to every model.

        `check` is called repeatedly; an exception from it cancels the start. Raises
        ServerStartError if a port is taken, the server ends, a model fails or time runs out; no
        process is left running then.
        """
        assert self._process is None, "a server object can be started once"
        if problems := self.port_problems():
            self._fail(f"{self.name} was not started:", problems)
        missing = [name for name, port in self._wanted_ports.items() if port == 0]
        with free_ports(self.host, len(missing)) as chosen:
            self.ports = self._wanted_ports | dict(zip(missing, chosen, strict=True))
            try:
                self._launch()
                deadline = time.monotonic() + timeout_s
                for loading in self._starting(progress):
                    check()
                    if time.monotonic() > deadline:
                        self._fail(f"{self.name} was not ready after {timeout_s:g} s:", loading)
            except BaseException:
                self.stop(drain_s=0)
                raise

    def _launch(self) -> None:
        """Start the process."""
        raise NotImplementedError

    def _starting(self, progress: Callable[[str], None]) -> Iterator[Sequence[str]]:
        """Yield what is still loading until the server is ready. Raises ServerStartError."""
        raise NotImplementedError

    def poll(self) -> int | None:
        """Return the exit status (128 + n after signal n), or None while the server runs."""
        return self._process.poll() if self._process else None

    def failure(self) -> str | None:
        """Return why the server no longer serves all its models, None while it does."""
        if (status := self.poll()) is not None:
            return self._lost() or f"{self.name} ended with status {status}"
        return self._fault()

    def _fault(self) -> str | None:
        """Return why a running server does not serve all its models, None if it does."""
        raise NotImplementedError

    def stop(self, *, drain_s: float = 30.0) -> None:
        """End the server and everything it started; running requests get `drain_s` to finish."""
        process = self._process
        if process is None:
            return
        below = descendants(process.pid)
        self._await_last_answers()
        if self.poll() is None and drain_s > 0:
            process.terminate()
            self.ended_within(drain_s)
        below += descendants(process.pid)
        kill([process.pid])
        self.ended_within(_END_S)
        # A supervisor needs time to end its processes and to remove shared memory.
        deadline = time.monotonic() + _END_S
        while any(map(is_running, below)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        kill(below)
        process.link.close()

    def _await_last_answers(self) -> None:
        """Give a server that has lost a process a moment to answer its pending requests."""

    def __enter__(self: _Server) -> _Server:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.stop(drain_s=30.0 if error is None else 0)

    def _start_process(
        self,
        program: Sequence[str],
        words: Sequence[str],
        *,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> LinkedProcess:
        """Start a program with an empty log; `words` are its arguments after the link's FD."""
        log_path = log_path or self.log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
        env = {**os.environ, **self.env, **(env or {})}
        return LinkedProcess(program, words, log_path=log_path, env=env)

    def _lost(self) -> str:
        """Return the failure that the server itself has reported, "" if none."""
        return ""

    def _fail(self, summary: str, reasons: Sequence[str] = ()) -> NoReturn:
        lines = last_lines(self.log_path, 200)
        found = list(dict.fromkeys(reasons)) or [line for line in lines if _ERROR.match(line)]
        raise ServerStartError(summary, reasons=found, log_path=self.log_path)

    def ended_within(self, limit_s: float) -> bool:
        """Wait until the server has ended, at most `limit_s`; return whether it has."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.poll() is not None


def kill(pids: Sequence[int]) -> None:
    """Kill processes, also stopped ones."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
