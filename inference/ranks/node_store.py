"""A store of ranks on one node: a file in a folder that only their user can enter.

It opens no port that another user could connect to.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import Store

from inference.private_folder import PrivateFolder

_NAME = "store"
_KEPT = -1  # in place of the number of ranks: the last of them does not remove the file


class NodeStore:
    """A new store, owned by the process that starts the ranks. `close` removes it."""

    def __init__(self, *, timeout_s: float) -> None:
        self._folder = PrivateFolder("store")
        self.path = self._folder.path / _NAME
        self.store = join_node_store(self.path, timeout_s=timeout_s)

    def close(self) -> None:
        """Remove the file; may be called again."""
        self._folder.remove()


def join_node_store(path: Path, *, timeout_s: float) -> Store:
    """Return the store at a path, whose waits end after `timeout_s`."""
    store = FileStore(os.fsencode(path).decode(), _KEPT)  # UTF-8, whatever the locale
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
