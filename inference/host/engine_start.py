"""Starts engine processes, also before it is known what they will serve.

This module is light to import, so that the first engine process can start and import torch while
the server process still imports its protocols.
"""

from inference.system.parent_process import LinkedProcess, checkout_program

_PROGRAM = checkout_program("inference.host.engine_process")
_early: list[LinkedProcess] = []


def start_early(folder: str) -> None:
    """Start the first engine process ahead of time; `started_engine` will return it."""
    _early.append(LinkedProcess(_PROGRAM, [folder]))


def started_engine(folder: str) -> LinkedProcess:
    """Return an engine process; it ends with the thread that has started it.

    `folder`, that of the models, only shows in the process list.
    """
    return _early.pop() if _early else LinkedProcess(_PROGRAM, [folder])


def end_early() -> None:
    """End a process that was started early and that no engine has taken."""
    while _early:
        process = _early.pop()
        process.link.close()
        process.kill()
        process.wait()
