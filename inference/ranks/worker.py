"""The process of a rank other than 0, which runs the steps that rank 0 sends.

It ends when rank 0 does.
"""

import argparse
import faulthandler
import itertools
import logging
import signal
import sys
import traceback
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from inference.ranks.node_ranks import join_node_store
from inference.ranks.plan import Command, StepPlan, unpack_message
from inference.ranks.rendezvous import Follower, RendezvousError, device_name
from inference.ranks.settings import RankSettings
from inference.ranks.startup import make_rank, reach_milestone, report_failure
from inference.system.launch_environment import LaunchEnvironment
from inference.system.parent_process import end_with_parent
from inference.system.process_memory import keep_loaded

logger = logging.getLogger(__name__)


def main() -> int:
    """Run one rank until rank 0 stops it; return 1 if it failed."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.ranks.worker",
        description="One rank of a model. Rank 0 starts it, and sends its settings as a line of "
        "JSON to its standard input.",
    )
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--ft-dir", required=True, help="only shown in process lists")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {arguments.rank} %(levelname)s %(message)s"
    )
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    end_with_parent()
    with open(0, "rb", closefd=False) as stdin:  # in a fork sys.stdin is still the parent's
        text = stdin.readline().decode()
    if not text:
        return 0  # rank 0 has ended, or does not need this process
    settings = RankSettings.from_json(text)
    return _serve(
        settings, join_node_store(Path(settings.store), timeout_s=settings.rank_timeout_s)
    )


def serve_launched_rank(
    place: LaunchEnvironment, host: str, port: int, key_file: Path, *, timeout_s: float
) -> int:
    """Run the rank that a launcher started in this process; return 1 if it failed.

    Arguments are those of `Follower`.
    """
    try:
        with closing(Follower(place, host, port, key_file, timeout_s=timeout_s)) as follower:
            return _serve(follower.settings(), follower.store)
    except RendezvousError as error:
        logger.error("%s", error)
        return 1


def _serve(settings: RankSettings, store: Store) -> int:
    """Run a rank until rank 0 stops it; return 1 if it failed."""
    torch.set_num_threads(settings.threads)
    milestones = itertools.count()

    def reach_next() -> None:
        reach_milestone(store, settings.rank, next(milestones))

    try:
        rank = make_rank(settings)
        store.set(f"device/{settings.rank}", device_name(rank.device))
        reach_next()
        groups = rank.connect(store, settings)
        rank.prepare()
        reach_next()
        keep_loaded()
        logger.info("ready")
        while (message := unpack_message(groups.receive_message())) != Command("stop"):
            if isinstance(message, StepPlan):
                rank.run(message)
            elif message.name == "exchange":
                rank.exchange(replace(settings, ft_dir=message.ft_dir))
                reach_next()
                rank.prepare()
                reach_next()
                keep_loaded()
            else:
                rank.ping()
        rank.close()
    except Exception as error:  # rank 0 reports it
        traceback.print_exc()
        report_failure(store, settings.rank, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
