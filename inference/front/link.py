"""The front's link to its owner: settings and orders come, events go back, its end ends the front.

One connection carries all of it. The owner sends records, the front lines of text: nothing that it
sends could run in its owner.
"""

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from inference.front.access import Access, OpenAIOptions

LONGEST_REQUEST_S = 86400.0  # in effect no limit; the server needs one
SERVES, LEFT = "serves", "left"  # events, before the folder of a server's sockets
_GRACE_S = 1.0


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

    `orders` has servers that are to take over, `ready` folders of sockets of those that are ready.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self.orders: asyncio.Queue[Served] = asyncio.Queue()
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

    def tell(self, event: str, sockets: Path) -> None:
        """Send an event to the owner, if there still is one."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(f"{event} {sockets}".encode())
