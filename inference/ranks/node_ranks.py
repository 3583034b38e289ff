"""The ranks other than 0 as processes of this node, and the store by which they meet."""

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

_KEPT = -1  # in place of the number of ranks: the last of them does not remove the file
_POLL_S = 0.02


def join_node_store(path: Path, *, timeout_s: float) -> Store:
    """Return the store in a file of this node, whose waits end after `timeout_s`.

    The file lies in a folder that only this user can enter: no port that others could connect to.
    """
    store = FileStore(os.fsencode(path).decode(), _KEPT)  # UTF-8, whatever the locale
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class NodeRanks:
    """Starts, watches and ends the other ranks, as `Rendezvous` does for those of a launcher.

    `problems` and `close` may be called from any thread.
    """

    def __init__(self, *, timeout_s: float) -> None:
        """Make the store, whose waits end after `timeout_s`."""
        self._folder = PrivateFolder("store")
        self._path = self._folder.path / "store"
        self.store = join_node_store(self._path, timeout_s=timeout_s)
        self._workers: dict[int, Worker] = {}
        self._lock = threading.Lock()  # held while workers and store are used

    def announce(self, settings: RankSettings) -> None:
        """Start every other rank with the settings to load; call it from a long-lived thread."""
        with self._lock:
            for rank in range(1, settings.world_size):
                own = replace(settings, rank=rank, store=str(self._path))
                self._workers[rank] = start_worker(own)

    def problems(self) -> dict[int, str]:
        """Return the exit of each worker that has ended, with its reason or its last line."""
        with self._lock:
            return {
                rank: f"{how}: {failure_of(self.store, rank) or worker.last_line()}"
                for rank, worker in self._workers.items()
                if (how := worker.ended())
            }

    def close(self, *, grace_s: float) -> None:
        """Wait for the workers to exit, then kill those that remain; may be called again."""
        deadline = monotonic() + grace_s
        with self._lock:
            for worker in self._workers.values():
                while worker.ended() is None and monotonic() < deadline:
                    sleep(_POLL_S)
            for worker in self._workers.values():
                worker.kill()
            self._workers.clear()
            self._folder.remove()
