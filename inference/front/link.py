"""The link between a server and its owner; without an owner the server ends.

The owner sends the settings as a record, and later an order: to serve a repository as it is now in
the place of what was loaded. The server sends objects of JSON, so that nothing can run in
its owner: `says`, a line on the progress of the start; `models`, their names once they are ready;
`failures`, why it cannot serve; `lost`, why it is about to end; `kept`, why the repository that was
served is served on; `used`, the Unix time of the latest request of a client.
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

LONGEST_REQUEST_S = 86400.0  # in effect no limit; the server needs one
WITH_ENGINE = "engine"  # a word of the server's command: it starts an engine's process at once
_GRACE_S = 1.0


@dataclass(frozen=True)
class TritonOptions:
    """A tritonserver that runs the models.

    Attributes:
        log_path: to which it appends.
        prefix: starts it, such as mpirun.
        is_nvidias: it has NVIDIA's C++ backend, and may be of an old release.
    """

    log_path: Path
    prefix: tuple[str, ...] = ()
    is_nvidias: bool = False


@dataclass(frozen=True)
class CanaryTimes:
    """The time between two canaries of a model, and how long an answer may take.

    One that has answered the last time has less: 50 times its slowest answer so far, and at least
    5 s.
    """

    interval_s: float = 5.0
    timeout_s: float = 20.0


@dataclass(frozen=True)
class HostSettings:
    """The first record of the owner: what to serve, and where."""

    repository: str  # a folder, or the address of one in an object store
    triton: TritonOptions | None  # None for this project's own engines
    host: str  # to listen at
    ports: Mapping[str, int]  # http, grpc, metrics and, with `openai`, openai
    access: Access
    openai: OpenAIOptions | None
    canaries: CanaryTimes


@dataclass(frozen=True)
class Reload:
    """An order of the owner: to serve a repository as it is now.

    Attributes:
        repository: as in `HostSettings`.
        exchanges: its weights go into the engines that are there, after their last answers;
            otherwise new ones are loaded next to them.
    """

    repository: str
    exchanges: bool = False


class OwnerLink:
    """The server's end of the connection; without its owner the process ends after a moment.

    `reload` is set when the owner has sent an `order`, and cleared by the server.
    SIGTERM and Ctrl-C set `stopped`: running requests may finish, however long they take; the
    sender of the signal sets the limit.
    """

    def __init__(self, connection: Connection) -> None:
        self.stopped, self._lost = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopped.set)
        self.reload = asyncio.Event()
        self.order: Reload | None = None
        self._connection = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    async def finish(self, *ends: Coroutine[Any, Any, None]) -> None:
        """Wait until the servers that this process runs have ended, after their last answers."""
        ending = asyncio.gather(*ends)
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

    def tell(self, **news: object) -> None:
        """Send news to the owner, if there still is one."""
        with contextlib.suppress(OSError):
            text = json.dumps(news, ensure_ascii=False)
            self._connection.send_bytes(text.encode(errors="replace"))
