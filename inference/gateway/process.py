"""Limits of access and stop signals of the processes in front of a server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from inference.gateway.access import Access, access_of


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
    try:
        asyncio.run(serve(arguments, access))
    except errors as error:
        sys.stderr.write(f"error: {failure}: {error}\n")
        return 1
    return 0


def stop_event(lifeline: int | None) -> asyncio.Event:
    """Return an event that SIGTERM, Ctrl-C and the end of the lifeline pipe set."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if lifeline is not None:
        loop.add_reader(lifeline, stopped.set)
    return stopped
