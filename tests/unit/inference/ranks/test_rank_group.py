"""Ranks that end while their connections are made, and while another thread ends them."""

import threading
from typing import Any, cast

import pytest

from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.parallel.groups import RankGroups
from inference.ranks.node_ranks import NodeRanks
from inference.ranks.processes import Worker
from inference.ranks.settings import Placement
from tests.ft_folders import write_gpt


def test_a_rank_that_ends_before_it_connects_is_named(tmp_path, monkeypatch):
    def connect(*arguments: Any, **options: Any) -> RankGroups:
        ranks = engine._ranks
        assert ranks is not None
        assert isinstance(ranks._others, NodeRanks)
        ranks._others._workers[1].process.kill()
        return RankGroups(*arguments, **options)

    monkeypatch.setattr("inference.ranks.base.RankGroups", connect)
    options = EngineOptions(rank_timeout_s=1)
    engine = Engine(
        write_gpt(tmp_path, tp_size=2), Placement(tp_size=2, device="cpu"), options=options
    )
    with pytest.raises(EngineFailedError, match="rank 1: was ended by SIGKILL"):
        engine.start()


class EndedWorker:
    """A worker that has ended; another thread ends all of them while it is asked."""

    def __init__(self, ranks: NodeRanks) -> None:
        self.ending = threading.Thread(target=ranks.close, kwargs={"grace_s": 0})
        self.stopped = False

    def ended(self) -> str:
        if not self.ending.ident:
            self.ending.start()
            self.ending.join(0.2)
        return "ended with status 1"

    def last_line(self) -> str:
        assert not self.stopped, "the output is closed"
        return "last"

    def kill(self) -> None:
        self.stopped = True


def test_the_reason_is_read_while_another_thread_ends_the_ranks():
    ranks = NodeRanks(timeout_s=1)
    worker = EndedWorker(ranks)
    ranks._workers[1] = cast(Worker, worker)
    assert ranks.problems() == {1: "ended with status 1: last"}
    worker.ending.join()
    assert worker.stopped
    assert ranks.problems() == {}
