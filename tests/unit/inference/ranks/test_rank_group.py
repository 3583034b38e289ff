"""Ranks that end while their connections are made, and while another thread ends them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.parallel.groups import RankGroups
from inference.ranks.processes import RankProcesses
from inference.ranks.rank_group import RankGroup
from inference.ranks.settings import Placement, RankSettings
from tests.ft_folders import write_gpt


def test_a_rank_that_ends_before_it_connects_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: Any, **options: Any) -> RankGroups:
        ranks = engine._ranks
        assert ranks is not None
        assert ranks._processes is not None
        ranks._processes._workers[1].process.kill()
        return RankGroups(*arguments, **options)

    monkeypatch.setattr("inference.ranks.base.RankGroups", connect)
    options = EngineOptions(rank_timeout_s=1)
    engine = Engine(
        write_gpt(tmp_path, tp_size=2), Placement(tp_size=2, device="cpu"), options=options
    )
    with pytest.raises(EngineFailedError, match="rank 1: was ended by SIGKILL"):
        engine.start()


class EndedProcesses:
    """Workers that have ended; another thread ends the group while they are asked."""

    def __init__(self, group: RankGroup) -> None:
        self.ending = threading.Thread(target=group.end, kwargs={"grace_s": 0})
        self.stopped = False

    def ended(self) -> dict[int, str]:
        self.ending.start()
        self.ending.join(0.2)
        return {1: "ended with status 1"}

    def output(self, _rank: int) -> str:
        assert not self.stopped, "the output is closed"
        return "first\nlast"

    def stop(self, *, grace_s: float) -> None:
        assert grace_s == 0
        self.stopped = True


def test_the_reason_is_read_while_another_thread_ends_the_ranks() -> None:
    settings = RankSettings(ft_dir="/weights", rank=0, tp_size=2, slots=1, max_len=8, threads=1)
    group = RankGroup(settings, start_timeout_s=1)
    processes = EndedProcesses(group)
    group._processes = cast(RankProcesses, processes)
    assert group.problem() == "rank 1: ended with status 1: last"
    processes.ending.join()
    assert processes.stopped
    assert group.problem() is None
