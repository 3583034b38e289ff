"""`python -m inference.pytriton.local_ranks N OPTION...`: PyTriton on N ranks of this node.

Asked to end, it asks rank 0 alone, which answers what it has begun; the others end when it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from inference.launch_environment import LAUNCHER_VARIABLE

_ENTRY = "inference.pytriton.server"
_OTHERS_S = 15.0  # for the other ranks to notice that rank 0 has ended


def main(argv: Sequence[str]) -> int:
    """Return the status of rank 0, 128 + n after signal n."""
    count, options = int(argv[0]), argv[1:]
    command = [sys.executable, "-u", "-m", _ENTRY, *options]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **_variables(rank, count)})
        for rank in range(count)
    ]

    def ask_to_end(_number: int, _frame: FrameType | None) -> None:
        ranks[0].terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_end)
    status = ranks[0].wait()
    for rank in ranks[1:]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(_OTHERS_S)
        rank.kill()
        rank.wait()
    return status if status >= 0 else 128 - status


def _variables(rank: int, count: int) -> dict[str, str]:
    """Return the variables of a process with its rank, as torch's launchers set them."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {name: str(value) for name, value in numbers.items()} | {LAUNCHER_VARIABLE: "torch"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
