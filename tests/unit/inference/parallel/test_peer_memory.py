"""The ranks of a stage agree on whether their GPUs share memory."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from inference.parallel import peer_memory

RANKS = 3


@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_all_ranks_do_without_where_one_has_no_memory(failing, monkeypatch):
    class Memory:
        """Memory of as many bytes as the number of its rank."""

        def __init__(self, size_bytes: int) -> None:
            if size_bytes == failing:
                raise OSError("cuMemAlloc_v2: CUDA error 2")
            self.mapped: list[str] = []

        def handle(self) -> str:
            return "named"

        def map(self, _rank: int, handle: str, *_: int) -> None:
            self.mapped.append(handle)

        def unmap(self) -> None:
            self.mapped.clear()

    monkeypatch.setattr(peer_memory, "PeerMemory", Memory)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))

    def opened(place: int) -> Any:
        return peer_memory.open_peer_memory(
            store, place, RANKS, torch.device("cuda", place), size_bytes=place
        )

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(opened, range(RANKS)))
    if failing is None:
        assert [each.mapped for each in found] == [["named"] * (RANKS - 1)] * RANKS
    else:
        assert found == [None] * RANKS
