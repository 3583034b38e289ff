"""The link between a server and its owner; without an owner the server ends.

The owner sends the settings as a record, and later `Reload` orders. The server sends JSON objects,
so that it cannot run code in its owner: `says`, a line on the progress of the start; `models`, once
they are ready, by name with the checkpoint that each serves; `failures`, why it cannot serve;
`lost`, why it is about to end; `kept`, why a reload has failed and the former repository is still
served; `used`, the Unix time of the latest request of a client.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inference.front.access import Access, OpenAIOptions

MAX_REQUEST_S = 86400.0  # aiohttp needs a limit; this is in effect none
WITH_ENGINE = "engine"  # argument of the server's command: start an engine's process at once
_GRACE_S = 1.0


@dataclass(frozen=True)
class TritonOptions:
    """A tritonserver that runs the models.

    Attributes:
        log_path: its log, appended to.
        prefix: command that starts it, such as mpirun.
        has_nvidia_backend: it runs NVIDIA's C++ backend, and may be an old release.
    """

    log_path: Path
    prefix: tuple[str, ...] = ()
    has_nvidia_backend: bool = False


@dataclass(frozen=True)
class CanaryTimes:
    """The time between two canaries of a model, and how long an answer may take.

    A model that answered the last canary has less time: 50 times its slowest answer so far, at
    least 5 s.
    """

    interval_s: float = 5.0
    timeout_s: float = 20.0


@dataclass(frozen=True)
class HostSettings:
    """The owner's first record: what to serve, and where."""

    repository: str  # a folder, or the URL of an object store
    triton: TritonOptions | None  # None for this project's own engines
    host: str  # address to listen on
    ports: Mapping[str, int]  # http, grpc, metrics and, with `openai`, openai
    access: Access
    openai: OpenAIOptions | None
    canaries: CanaryTimes


@dataclass(frozen=True)
class Reload:
    """An order of the owner: serve a repository as it is now, in place of what is loaded.

    Attributes:
        repository: as in `HostSettings`.
        exchanges: load the weights into the running engines, after their last answers, instead of
            loading new engines next to them.
    """

    repository: str
    exchanges: bool = False


class OwnerLink:
    """The server's end of the connection; the process ends soon after its owner.

    `reload` is set when the owner has sent an `order`, and cleared by the server.
    SIGTERM and Ctrl-C set `stopped`: running requests then finish, however long they take; the
    sender of the signal enforces a limit.
    """

    def __init__(self, connection: Connection) -> None:
        self.stopped, self._lost = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopped.set)
        self.reload = asyncio.Event()
        self.order: Reload | None = None
        self._connection = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    async def finish(self, end: Coroutine[Any, Any, None]) -> None:
        """Wait for the end of all requests, or until 1 s after the owner's end."""
        ending = asyncio.ensure_future(end)
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait((ending, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending, _GRACE_S)

    def _read(self) -> None:
        try:
            self.order = self._connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._lost.set()
            self.stopped.set()
            return
        self.reload.set()

    def send(self, **news: object) -> None:
        """Send news to the owner, if it still runs."""
        with contextlib.suppress(OSError):
            text = json.dumps(news, ensure_ascii=False)
            self._connection.send_bytes(text.encode(errors="replace"))
