"""Ranks that a launcher has started on several nodes, and the server's model among them.

`python -m inference.serving.started_rank` runs one rank other than 0. Rank 0 is the model inside
the server on the first node. SLIPWAY_MEETING names the `host:port` where they meet.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from inference.serving.process_place import ProcessPlace, find_place

if TYPE_CHECKING:
    from inference.serving.meeting import Meeting

MEETING_VARIABLE = "SLIPWAY_MEETING"


def started_place(world_size: int) -> tuple[ProcessPlace, str, int] | None:
    """Return this process's place and where the ranks meet; None if no launcher started them.

    Raises:
        ValueError: the launcher has started another number of ranks, or the address is none.
    """
    address = os.environ.get(MEETING_VARIABLE)
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{MEETING_VARIABLE}={address} is not of the form host:port")
    place = find_place(os.environ)
    if place.world_size != world_size:
        raise ValueError(
            f"{place.launcher} has started {place.world_size} processes for {world_size} ranks "
            "(tensor_para_size x pipeline_para_size); start one process for each rank"
        )
    return place, host, int(port)


def open_meeting(world_size: int, *, timeout_s: float) -> Meeting | None:
    """Return the meeting of rank 0 with the ranks of a launcher; None if there are none.

    Raises:
        ValueError: as `started_place`.
        MeetingError: the address cannot be had.
    """
    found = started_place(world_size)
    if found is None:
        return None
    from inference.serving.meeting import Meeting

    place, host, port = found
    return Meeting(place, host, port, timeout_s=timeout_s)


def main() -> int:
    """Run this process's rank until rank 0 ends; return 1 if it failed."""
    from inference.serving.engine_options import EngineOptions
    from inference.serving.worker import serve_started_rank

    place = find_place(os.environ)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s"
    )
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's affair
    found = started_place(place.world_size)
    if found is None:
        sys.stderr.write(f"{MEETING_VARIABLE} is not set: it names host:port of rank 0\n")
        return 2
    _, host, port = found
    return serve_started_rank(place, host, port, timeout_s=EngineOptions().rank_timeout_s)


if __name__ == "__main__":
    sys.exit(main())
