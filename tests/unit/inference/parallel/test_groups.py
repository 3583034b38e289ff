"""Sums, plans and messages among ranks, over shared memory and over gloo."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import IO, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from inference.parallel import shared_memory
from inference.parallel.groups import RankGroups
from inference.parallel.layout import ParallelLayout

T = TypeVar("T")
BOTH = pytest.mark.parametrize("memory", [True, False], ids=["memory", "gloo"])


def on_ranks(
    work: Callable[[RankGroups], T],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    memory: bool,
    timeout_s: float = 20,
) -> list[T]:
    """Return what `work` returns on each rank."""
    store = HashStore()

    def run(rank: int) -> T:
        layout = ParallelLayout(rank, tp_size, pp_size)
        device = torch.device("cpu")
        return work(
            RankGroups(layout, store, device=device, timeout_s=timeout_s, shared_memory=memory)
        )

    with ThreadPoolExecutor(tp_size * pp_size) as pool:
        return list(pool.map(run, range(tp_size * pp_size)))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_sum_is_the_same_on_every_rank(memory, dtype, size):
    def work(groups: RankGroups) -> list[torch.Tensor]:
        values = torch.arange(size).remainder(17).to(dtype) * (groups.layout.rank + 1)
        return [groups.all_reduce(values.clone()) for _ in range(5)]

    expected = (torch.arange(size).remainder(17) * 6).to(dtype)
    for sums in on_ranks(work, tp_size=3, memory=memory):
        assert all(each.equal(expected) for each in sums)


@BOTH
@pytest.mark.parametrize("length", [0, 4092, 4093, 800_000])
def test_a_message_reaches_every_rank(memory, length):
    messages = [bytes(n % 251 for n in range(size)) for size in (length, 9, length + 1)]

    def work(groups: RankGroups) -> list[bytes]:
        if groups.layout.rank:
            return [groups.receive_message() for _ in messages]
        for message in messages:
            groups.send_message(message)
        return messages

    assert on_ranks(work, tp_size=2, pp_size=2, memory=memory) == [messages] * 4


@BOTH
@pytest.mark.parametrize("size", [5, 500_000])
def test_stages_pass_on_and_the_last_answers(memory, size):
    def work(groups: RankGroups) -> list[torch.Tensor]:
        layout = groups.layout
        x = torch.full((1, size), float(layout.tp_rank + 1))
        for _ in range(3):
            if not layout.is_first_stage:
                x = groups.receive(torch.empty(1, size), layout.previous_rank) * 2
            if not layout.is_last_stage:
                groups.send(x, layout.next_rank).wait()
            part = x if layout.is_last_stage else None
            slices = groups.gather(part, (1, size), ranks=layout.last_stage_ranks)
        return slices

    first, *others = on_ranks(work, tp_size=2, pp_size=3, memory=memory)
    assert [each[0, 0].item() for each in first] == [4.0, 8.0]
    assert all(each.equal(torch.full((1, size), each[0, 0].item())) for each in first)
    assert others == [[]] * 5


@BOTH
def test_a_rank_that_does_not_come_ends_the_wait(memory):
    ended = threading.Event()

    def work(groups: RankGroups) -> None:
        if groups.layout.rank == 0:
            with pytest.raises(RuntimeError):
                groups.all_reduce(torch.ones(3))
            ended.set()
        else:
            assert ended.wait(60)

    on_ranks(work, tp_size=2, memory=memory, timeout_s=2)


def test_waits_can_be_aborted():
    def work(groups: RankGroups) -> None:
        if groups.layout.rank == 0:
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(groups.all_reduce, torch.ones(3))
                time.sleep(0.2)
                groups.abort()
                with pytest.raises(RuntimeError, match="the ranks were ended"):
                    waiting.result(5)

    on_ranks(work, tp_size=2, memory=True)


def test_no_file_is_left_in_memory():
    on_ranks(lambda groups: groups.barrier(), tp_size=2, pp_size=2, memory=True)
    assert list(Path("/dev/shm").glob(f"slipway-{os.getpid()}-*")) == []


def test_no_file_is_left_in_memory_where_a_rank_does_not_join():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RuntimeError):
        shared_memory.open_group(store, 0, 2, timeout_s=0.1)
    assert list(Path("/dev/shm").glob(f"slipway-{os.getpid()}-*")) == []


def test_ranks_without_common_memory_use_gloo(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path / "absent")
    sums = on_ranks(lambda groups: groups.all_reduce(torch.ones(4)), tp_size=2, memory=True)
    assert all(each.equal(torch.full((4,), 2.0)) for each in sums)


def test_counting_words_wrap_around(monkeypatch):
    create = shared_memory._create

    def nearly_worn(size: int) -> IO[bytes] | None:
        file = create(size)
        assert file is not None
        for word in range(shared_memory._Layout(size).words):
            file.seek(word * shared_memory._WORD_BYTES)
            file.write((2**32 - 3).to_bytes(4, "little"))
        file.flush()
        return file

    monkeypatch.setattr(shared_memory, "_create", nearly_worn)

    def work(groups: RankGroups) -> list[float]:
        groups.barrier()
        return [groups.all_reduce(torch.ones(1)).item() for _ in range(9)]

    assert on_ranks(work, tp_size=2, memory=True) == [[2.0] * 9] * 2
