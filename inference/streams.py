"""New tokens on their way from a model's process to the front, past the server.

tritonserver 2.51 takes 0.3 ms for each response: one token of 64 streams would take 20 ms, three
times what the step takes that computes them. The front therefore listens at a socket next to the
server's own, and the model sends there, in one message for a step, what all streams have got. The
server itself passes on requests, refusals and whole answers, as for any client.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from inference.supervision import REPORTS_VARIABLE

# A parameter of requests: the name of a stream, which no client can guess; "" for none, and no
# response but the whole answer.
STREAM_PARAMETER = "slipway_stream"
SOCKET_NAME = "streams"  # in the folder of the server's sockets
_BACKLOG = 512  # news that the front has not passed on: eight steps of 64 streams
_MOST_BYTES = 64 << 20  # of a message; a token takes 8, and clients limit how many there are

# The tokens that each row of a request has got since the message before.
News = Sequence[Sequence[int]]

logger = logging.getLogger(__name__)


class StreamSender:
    """Sends from any thread, and never waits; news goes with the next `flush`, in one message."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, News] | Callable[[], None] | None] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_lost = False

    def send(self, stream: str, news: News) -> None:
        """Add the new tokens of a stream to the next message."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
            self._thread.start()
        self._waiting.append((stream, news))

    def flush(self) -> None:
        """Send what waits."""
        self._wake.set()

    def after(self, call: Callable[[], None]) -> None:
        """Call a function once everything that was given to `send` before is sent."""
        if self._thread is None:
            call()
        else:
            self._waiting.append(call)
            self.flush()

    def stop(self) -> None:
        """Send what waits, and end."""
        self._waiting.append(None)
        self.flush()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        path = Path(os.environ[REPORTS_VARIABLE]).with_name(SOCKET_NAME)
        with socket.socket(socket.AF_UNIX) as connection:
            self._attempt(connection.connect, str(path))
            ends = False
            while not ends:
                self._wake.wait()
                self._wake.clear()
                waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
                messages = [each for each in waiting if isinstance(each, tuple)]
                if messages:
                    self._attempt(connection.sendall, json.dumps(messages).encode() + b"\n")
                for each in waiting:
                    if callable(each):
                        each()
                ends = None in waiting

    def _attempt(self, act: Callable[[Any], object], argument: object) -> None:
        """Use the connection; where that fails, whole answers alone are sent from then on."""
        try:
            if not self._is_lost:
                act(argument)
        except OSError as error:  # the front is gone, and the server about to follow
            logger.warning("streams: %s", error)
            self._is_lost = True


class StreamReceiver:
    """The front's end, of all models of a server.

    Attributes:
        is_behind: whether so much waits that a stream's news should be passed on together.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._server: asyncio.Server | None = None

    async def open(self, folder: Path) -> None:
        """Listen in the folder of a server's sockets."""
        self._server = await asyncio.start_unix_server(
            self._read, folder / SOCKET_NAME, limit=_MOST_BYTES
        )

    def close(self) -> None:
        """End listening."""
        if self._server is not None:
            self._server.close()

    @contextlib.contextmanager
    def stream(self) -> Iterator[tuple[str, asyncio.Queue[Any]]]:
        """Yield the name of a new stream, and a queue that gets its news."""
        name = secrets.token_hex(16)
        came: asyncio.Queue[Any] = asyncio.Queue()
        self._streams[name] = came
        try:
            yield name, came
        finally:
            del self._streams[name]

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                for name, news in json.loads(line):
                    if (stream := self._streams.get(name)) is not None:
                        stream.put_nowait(news)
                waiting = sum(each.qsize() for each in self._streams.values())
                self.is_behind = waiting > _BACKLOG
