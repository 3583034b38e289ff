"""Both ends of the link between a front and its owner; without an owner the front ends.

The owner sends settings and orders as records, the front events as lines of text: nothing that it
sends could run in its owner.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inference.front.access import Access, OpenAIOptions
from inference.parent_process import LinkedProcess, end_process

LONGEST_REQUEST_S = 86400.0  # in effect no limit; the server needs one
SERVES, LEFT = "serves", "left"  # events, before the folder of a server's sockets
_GRACE_S = 1.0
_END_S = 5.0  # for the last answers to be sent


@dataclass(frozen=True)
class Served:
    """A tritonserver: the folders of its sockets and of its models, None if those are elsewhere."""

    sockets: Path
    repository: Path | None


@dataclass(frozen=True)
class Readiness:
    """Whether all models of a server answer its owner."""

    sockets: Path
    is_ready: bool


@dataclass(frozen=True)
class FrontSettings:
    """The first record of the owner."""

    served: Served
    host: str  # to listen at
    ports: Mapping[str, int]  # http, grpc, metrics and, with `openai`, openai
    access: Access
    openai: OpenAIOptions | None  # None without the endpoint of OpenAI's protocol
    folder: Path  # where relative paths begin


@dataclass(frozen=True)
class HostSettings:
    """The first record of the owner of a server of this project's own."""

    repository: Path
    hidden: int | None  # width of the hidden states that an encoder takes, if it is known
    host: str  # to listen at
    ports: Mapping[str, int]  # http, grpc, metrics and, with `openai`, openai
    access: Access
    openai: OpenAIOptions | None
    folder: Path  # where relative paths begin


@dataclass(frozen=True)
class Question:
    """Whether a server of this project's own answers: `model` a canary, "" the server itself."""

    number: int
    model: str = ""


@dataclass(frozen=True)
class Reload:
    """Serve a repository as it is now in the place of the one that was loaded."""

    repository: Path


class Stop:
    """The end of the process, by SIGTERM or Ctrl-C: `stopped` is set.

    Running requests may finish, however long they take; the sender of the signal sets the limit.
    """

    def __init__(self) -> None:
        self.stopped, self._lost = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopped.set)

    async def finish(self, *ends: Coroutine[Any, Any, None]) -> None:
        """Wait until the servers that this process runs have ended, after their last answers."""
        ending = asyncio.gather(*ends)
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait((ending, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending, _GRACE_S)


class OwnerLink(Stop):
    """The front's end of the connection; without its owner the process ends after a moment.

    `orders` has servers that are to take over and other records, `ready` folders of sockets of the
    servers that are ready.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self.ready: set[Path] = set()
        self._connection = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._read)

    def _read(self) -> None:
        try:
            order = self._connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            self._lost.set()
            self.stopped.set()
            return
        if isinstance(order, Readiness):
            (self.ready.add if order.is_ready else self.ready.discard)(order.sockets)
        else:
            self.orders.put_nowait(order)

    def tell(self, event: str, about: object = "") -> None:
        """Send an event to the owner, if there still is one: a word, and what it is about."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(f"{event} {about}".encode(errors="replace"))


class FrontProcess(LinkedProcess):
    """A front, started; it ends with this process.

    At SIGTERM it takes no more requests, and ends once it has answered those that it has.
    """

    def __init__(self, settings: FrontSettings, *, log_path: Path) -> None:
        self._sending = threading.Lock()
        self._serves: set[str] = set()  # folders of sockets
        # The checkout that this process runs, wherever it was started.
        checkout = Path(__file__).resolve().parents[2]
        program = (sys.executable, "-m", "inference.front")
        super().__init__(program, log_path=log_path, cwd=checkout)
        self.send(settings)

    def serves(self, sockets: Path) -> bool:
        """Return whether it passes requests on to a server, or still has some of them there."""
        with contextlib.suppress(EOFError, OSError):
            while self.link.poll():
                event, _, folder = os.fsdecode(self.link.recv_bytes()).partition(" ")
                (self._serves.discard if event == LEFT else self._serves.add)(folder)
        return self.poll() is None and str(sockets) in self._serves

    def send(self, record: FrontSettings | Served | Readiness) -> None:
        """Have it know a server's readiness, or pass new requests on to another server.

        `serves` shows when it does.
        """
        with self._sending, contextlib.suppress(OSError):  # its exit status reports its end
            self.link.send(record)

    def end(self) -> None:
        """End it, and wait for that."""
        self.link.close()
        end_process(self, grace_s=_END_S)
