"""Access limits and stop signals of the processes in front of a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from inference.gateway.access import Access, access_of

# A connection that does not send the whole head of a request is closed after this.
IDLE_S = 600.0
LONGEST_REQUEST_S = 86400.0  # in effect no limit; the server needs one
_GRACE_S = 1.0
# A request that is not HTTP or cannot be decoded, and a client that has left before its end.
_CLIENTS_ERRORS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


def run(
    arguments: argparse.Namespace,
    serve: Callable[[argparse.Namespace, Access], Coroutine[Any, Any, None]],
    *,
    failure: str,
    errors: type[Exception] | tuple[type[Exception], ...] = OSError,
) -> int:
    """Serve until `serve` returns; return 0, 1 after one of `errors` or 2 for wrong limits.

    Args:
        arguments: Of the command, with the options of `add_access_options`.
        serve: Called with the arguments and the limits of access.
        failure: The start of the error message, before the reason.
        errors: Exceptions that are reported in one line.
    """
    access = access_of(vars(arguments))
    if problems := access.problems(prefix="--", joiner="-"):
        sys.stderr.write("".join(f"error: {problem}\n" for problem in problems))
        return 2
    # Idle connections are cheap, as long as there are descriptors for them.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    try:
        asyncio.run(serve(arguments, access))
    except errors as error:
        sys.stderr.write(f"error: {failure}: {error}\n")
        return 1
    return 0


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for a client's error, of which aiohttp would log a traceback each time."""
    return not (record.exc_info and isinstance(record.exc_info[1], _CLIENTS_ERRORS))


class Stop:
    """The end of a process in front of a server: by SIGTERM or Ctrl-C, or with its owner.

    A signal lets running requests finish, however long they take; whoever sends it sets the limit.
    Without its owner, whose end closes the lifeline pipe, the process ends after a moment.
    """

    def __init__(self, lifeline: int | None) -> None:
        self._asked, self._lost = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked.set)
        if lifeline is not None:
            loop.add_reader(lifeline, self._lose_owner, lifeline)

    def _lose_owner(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._lost.set()
        self._asked.set()

    async def wait(self) -> None:
        """Wait for either."""
        await self._asked.wait()

    async def finish(self, *ends: Coroutine[Any, Any, None]) -> None:
        """Wait until the servers that this process runs have ended, after their last answers."""
        ending = asyncio.gather(*ends)
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait((ending, lost), return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ending, _GRACE_S)
