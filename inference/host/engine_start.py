"""The start of an engine's process, perhaps before it is known what it will serve.

Light to import: the process of the first engine starts, and imports torch, while the server's own
process still imports its protocols.
"""

from inference.system.parent_process import LinkedProcess, checkout_program

_PROGRAM = checkout_program("inference.host.engine_process")
_early: list[LinkedProcess] = []


def start_early(folder: str) -> None:
    """Start the process that `started_engine` will return first."""
    _early.append(LinkedProcess(_PROGRAM, [folder]))


def started_engine(folder: str) -> LinkedProcess:
    """Return a process; it ends with the thread that has started it.

    `folder`, that of the models, is for the list of processes alone.
    """
    return _early.pop() if _early else LinkedProcess(_PROGRAM, [folder])


def end_early() -> None:
    """End a process that no engine has taken."""
    while _early:
        process = _early.pop()
        process.link.close()
        process.kill()
        process.wait()
