"""The ranks other than 0 as processes of this node, and the store through which they connect."""

import os
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import Store

from inference.ranks.processes import Worker, start_worker
from inference.ranks.settings import RankSettings
from inference.ranks.startup import failure_of
from inference.system.private_folder import PrivateFolder

_UNKNOWN_COUNT = -1  # of ranks: with a count, the last rank to close the store removes the file
_POLL_S = 0.02


def join_node_store(path: Path, *, timeout_s: float) -> Store:
    """Return the store in a file of this node; its waits end after `timeout_s`.

    The file is in a folder that only this user can enter, whereas a port would be open to others.
    """
    store = FileStore(os.fsencode(path).decode(), _UNKNOWN_COUNT)  # UTF-8 in every locale
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class NodeRanks:
    """Starts, watches and ends the other ranks, like `Rendezvous` for the ranks of a launcher.

    `problems` and `close` may be called from any thread.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Create the store; its waits end after `timeout_s`."""
        self._folder = PrivateFolder("store")
        self._path = self._folder.path / "store"
        self.store = join_node_store(self._path, timeout_s=timeout_s)
        self._workers: dict[int, Worker] = {}
        self._lock = threading.Lock()  # guards workers and store

    def announce(self, settings: RankSettings) -> None:
        """Start every other rank with the settings to load; call it from a long-lived thread."""
        with self._lock:
            for rank in range(1, settings.world_size):
                own = replace(settings, rank=rank, store=str(self._path))
                self._workers[rank] = start_worker(own)

    def problems(self) -> dict[int, str]:
        """Return how workers have exited, with the reason they reported or their last output."""
        with self._lock:
            return {
                rank: f"{how}: {failure_of(self.store, rank) or worker.last_line()}"
                for rank, worker in self._workers.items()
                if (how := worker.ended())
            }

    def close(self, *, grace_s: float) -> None:
        """Wait for the workers to exit, then kill the others; may be called repeatedly."""
        deadline = monotonic() + grace_s
        with self._lock:
            for worker in self._workers.values():
                while worker.ended() is None and monotonic() < deadline:
                    sleep(_POLL_S)
            for worker in self._workers.values():
                worker.kill()
            self._workers.clear()
            self._folder.remove()
