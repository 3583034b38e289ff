"""The tritonserver behind the front, and what the protocols in front of it share."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp
import grpc

from inference.front.access import Access
from inference.front.guard import Guard
from inference.front.link import Served
from inference.front.sessions import ClientSessions
from inference.front.sockets import CHANNEL_OPTIONS, ServerSockets
from inference.front.validation import read_declared_inputs
from inference.front.workers import Workers

_CANCEL_PAUSE_S = 0.02
_POLL_S = 0.05
_KEPT_S = 1.0  # idle connections; a tritonserver that ends first waits for the end of each
_T = TypeVar("_T")


class Upstream:
    """One tritonserver and the connections to it, and the inputs of its `models`, by name.

    `endpoint` answers OpenAI's requests with its models, once it is opened.
    """

    def __init__(self, served: Served) -> None:
        self.repository = served.repository
        self.sockets = ServerSockets(served.sockets)
        self.models = read_declared_inputs(served.repository)
        self.endpoint: Any = None
        self.cancellations = Cancellations()
        self.channel = grpc.aio.insecure_channel(f"unix:{self.sockets.grpc}", CHANNEL_OPTIONS)
        self.http, self.metrics = (
            client_session(aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=_KEPT_S))
            for socket in (self.sockets.http, self.sockets.metrics)
        )

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(self.channel.close(), self.http.close(), self.metrics.close())


def client_session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """Return a session that passes requests on, of any length and duration, as they are."""
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Cancellations:
    """Cancels streams one after the other, with a pause between them.

    Server 2.51 is apt to corrupt its memory, and to crash, when many are cancelled at the same
    moment, as those of one client that leaves.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, stream: Any) -> None:
        """Cancel a call of gRPC soon; returns at once."""
        task = asyncio.create_task(self._cancel(stream))
        self._tasks.add(task)  # the event loop itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _cancel(self, stream: Any) -> None:
        async with self._turn:
            stream.cancel()
            await asyncio.sleep(_CANCEL_PAUSE_S)


class Exchangeable(Generic[_T]):
    """A value that requests use: `current` for new ones, each keeps the one that it began with."""

    def __init__(self, value: _T) -> None:
        self.current = value
        self._users: Counter[_T] = Counter()

    @contextmanager
    def use(self) -> Iterator[_T]:
        """Yield the value, which stays in use for the duration of the block."""
        value = self.current
        self._users[value] += 1
        try:
            yield value
        finally:
            self._users[value] -= 1

    def users(self) -> int:
        """Return the number of blocks that use a value, current or former."""
        return self._users.total()

    async def exchange(self, value: _T) -> _T:
        """Use another value from now on; return the former one once its use has ended."""
        former, self.current = self.current, value
        while self._users[former]:
            await asyncio.sleep(_POLL_S)
        del self._users[former]
        return former


class FrontContext(Exchangeable[_T]):
    """The server of one front, and the parts that its protocols share.

    `is_ready` returns whether that server would answer; `limit` has the bytes of the largest
    request. `guard_of` makes a guard that lets in web pages of `origins`, and calls `note_use` for
    each request for a model.
    """

    def __init__(
        self,
        access: Access,
        upstream: _T,
        *,
        host: str,
        is_ready: Callable[[], bool],
        note_use: Callable[[], None],
        workers: Workers | None = None,
    ) -> None:
        super().__init__(upstream)
        self.is_ready = is_ready
        self.guard_of = partial(Guard, access, listens_at=host, note_use=note_use)
        self.guard = self.guard_of()
        self.shared_memory = access.client_shared_memory
        self.sessions = ClientSessions(host)
        self.workers = workers or Workers()
        self.limit = access.max_request_bytes
