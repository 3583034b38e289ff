"""Ranks that a launcher has started, possibly on several nodes.

`python -m inference.ranks.launched_rank` runs one rank other than 0. Rank 0 is the model in the
server on the first node.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from inference.system.launch_environment import (
    KEY_FILE_VARIABLE,
    RENDEZVOUS_VARIABLE,
    LaunchEnvironment,
    read_launch_environment,
)

if TYPE_CHECKING:
    from inference.ranks.rendezvous import Rendezvous


def launched_place(world_size: int) -> tuple[LaunchEnvironment, str, int, Path] | None:
    """Return this process's place in the launch, and the rendezvous's host, port and key file.

    None if no launcher has started the ranks.

    Raises:
        ValueError: The launcher has started another number of ranks, or the address is malformed.
    """
    address = os.environ.get(RENDEZVOUS_VARIABLE)
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{RENDEZVOUS_VARIABLE}={address} is not of the form host:port")
    place = read_launch_environment(os.environ)
    if place.world_size != world_size:
        raise ValueError(
            f"{place.launcher} has started {place.world_size} processes for {world_size} ranks "
            "(tensor_para_size x pipeline_para_size); start one process for each rank"
        )
    key_file = os.environ.get(KEY_FILE_VARIABLE)
    if not key_file:
        raise ValueError(f"{KEY_FILE_VARIABLE} is not set, and {RENDEZVOUS_VARIABLE} is")
    return place, host, int(port), Path(key_file)


def open_rendezvous(world_size: int, *, timeout_s: float) -> Rendezvous | None:
    """Return rank 0's rendezvous with the other ranks of a launcher, None without a launcher.

    Raises:
        ValueError: As for `launched_place`.
        RendezvousError: The address is unavailable.
    """
    found = launched_place(world_size)
    if found is None:
        return None
    from inference.ranks.rendezvous import Rendezvous

    return Rendezvous(*found, timeout_s=timeout_s)


def main() -> int:
    """Run this process's rank until rank 0 ends; return 1 if it failed."""
    from inference.ranks.settings import RANK_TIMEOUT_S
    from inference.ranks.worker import serve_launched_rank

    place = read_launch_environment(os.environ)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {place.rank} %(levelname)s %(message)s"
    )
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    found = launched_place(place.world_size)
    if found is None:
        sys.stderr.write(f"{RENDEZVOUS_VARIABLE} is not set; set it to host:port of rank 0\n")
        return 2
    return serve_launched_rank(*found, timeout_s=RANK_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
