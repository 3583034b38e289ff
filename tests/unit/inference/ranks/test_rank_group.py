"""Ranks that end while their connections are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference.engine.engine import Engine, EngineFailedError, EngineOptions
from inference.parallel.groups import RankGroups
from inference.ranks import rank_group
from inference.ranks.settings import Placement
from tests.ft_folders import write_gpt


def test_a_rank_that_ends_before_it_connects_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: Any, **options: Any) -> RankGroups:
        ranks = engine._loop._ranks
        assert ranks is not None
        assert ranks._processes is not None
        ranks._processes._workers[1].process.kill()
        return RankGroups(*arguments, **options)

    monkeypatch.setattr(rank_group, "RankGroups", connect)
    options = EngineOptions(rank_timeout_s=1)
    engine = Engine(
        write_gpt(tmp_path, tp_size=2), Placement(tp_size=2, device="cpu"), options=options
    )
    with pytest.raises(EngineFailedError, match="rank 1: was ended by SIGKILL"):
        engine.start()
