"""Other weights in a living engine: its answers are those of an engine that began with them."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from export_scripts.ft.reader import FTReader
from inference.engine.engine import Engine
from inference.engine.errors import EngineFailedError
from inference.engine.options import EngineOptions
from inference.ranks.rank_group import RankGroup
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.ft_folders import write_gpt
from tests.waiting import until

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41] * 3
OPTIONS = EngineOptions(max_lanes=4, share_prefixes=True)


def place(tp_size: int, pp_size: int) -> Placement:
    return Placement(tp_size=tp_size, pp_size=pp_size, device="cpu")


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """Return three answers, of which the last two find their beginnings in the cache."""
    request = request_of(engine, [PROMPT], [12])
    return [tuple(engine.generate(request).rows[0].output_ids[0]) for _ in range(3)]


@contextmanager
def serving(folder: Path, tp_size: int = 1, pp_size: int = 1) -> Iterator[Engine]:
    with Engine(folder, place(tp_size, pp_size), options=OPTIONS) as engine:
        yield engine


def processes_of(engine: Engine) -> list[int]:
    ranks = engine._ranks
    assert ranks is not None
    workers = getattr(ranks._others, "_workers", {})
    return [worker.process.pid for worker in workers.values()]


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "milestone"),
    [
        (1, 1, ""),
        (2, 1, "loaded"),
        pytest.param(2, 2, "prepared", marks=pytest.mark.long),
    ],
)
def test_answers_after_an_exchange_are_those_of_a_new_engine_until_a_rank_is_killed_during_one(
    tmp_path, tp_size, pp_size, milestone, monkeypatch
):
    folders = [write_gpt(tmp_path / f"{n}", tp_size=tp_size, seed=n) for n in range(2)]
    fresh = []
    for number in range(2):
        with serving(write_gpt(tmp_path / f"whole{number}", seed=number)) as engine:
            fresh.append(answers(engine))
    assert fresh[0] != fresh[1]
    with serving(folders[0], tp_size, pp_size) as engine:
        processes = processes_of(engine)
        assert answers(engine) == fresh[0]
        for number in (1, 0, 1):
            engine.exchange(folders[number])
            assert answers(engine) == fresh[number]
        assert engine.healthy() is None
        assert processes_of(engine) == processes
        assert len(processes) == tp_size * pp_size - 1
        if not milestone:
            return
        meet = RankGroup._meet

        def killing(ranks: RankGroup, done: str, problems: dict[int, str]) -> None:
            if done == milestone:
                os.kill(processes[0], signal.SIGKILL)
            meet(ranks, done, problems)

        monkeypatch.setattr(RankGroup, "_meet", killing)
        with pytest.raises(EngineFailedError, match=r"rank 1: .*SIGKILL"):
            engine.exchange(folders[0])
        assert engine.healthy() is not None


def test_requests_before_an_exchange_end_with_the_weights_that_they_began_with(
    tmp_path,
):
    folders = [write_gpt(tmp_path / f"{n}", seed=n) for n in range(2)]
    with serving(folders[0]) as engine:
        request = request_of(engine, [PROMPT], [40])
        alone = engine.generate(request).rows[0].output_ids[0]
        futures = [engine.submit(request) for _ in range(6)]  # more than there are slots
        engine.exchange(folders[1])
        assert [each.result().rows[0].output_ids[0] for each in futures] == [alone] * 6
        assert engine.generate(request).rows[0].output_ids[0] != alone


def test_a_folder_of_another_shape_is_refused_and_changes_nothing(tmp_path):
    mine = write_gpt(tmp_path / "mine")
    other = write_gpt(tmp_path / "other", num_layer=1)
    with serving(mine) as engine:
        before = answers(engine)
        with pytest.raises(ValueError, match=r"holds another model than .*mine"):
            engine.exchange(other)
        assert answers(engine) == before


@pytest.mark.parametrize("tp_size", [1, 2])
def test_weights_that_cannot_be_loaded_end_the_engine_with_the_reason(tmp_path, tp_size):
    folders = [write_gpt(tmp_path / f"{n}", tp_size=tp_size, seed=n) for n in range(2)]
    name = f"model.layers.0.mlp.dense_h_to_4h.weight.{tp_size - 1}.bin"
    values = np.fromfile(folders[1] / name, np.float32)
    values[7] = np.nan
    values.tofile(folders[1] / name)
    with serving(folders[0], tp_size) as engine:
        request = request_of(engine, [PROMPT], [4])
        with pytest.raises(EngineFailedError, match="not finite"):
            engine.exchange(folders[1])
        with pytest.raises(EngineFailedError, match="not finite"):
            engine.submit(request)


def test_an_engine_that_is_stopped_before_an_exchange_begins_says_so(tmp_path, monkeypatch):
    folders = [write_gpt(tmp_path / f"{n}", seed=n) for n in range(2)]
    with serving(folders[0]) as engine, ThreadPoolExecutor(1) as pool:
        asked = threading.Event()
        monkeypatch.setattr(engine, "after_step", asked.wait)  # the step does not end before
        engine.submit(request_of(engine, [PROMPT], [40]))
        exchanging = pool.submit(engine.exchange, folders[1])
        until(lambda: engine._next_dir is not None, "an exchange that waits")
        with engine._wake:
            engine._stopping = True  # as `stop` begins
        asked.set()
        engine.stop()
        with pytest.raises(EngineFailedError, match="stopped"):
            exchanging.result()


def test_a_folder_is_read_once_its_engine_exchanges(tmp_path):
    """A rank gives back what it has mapped of the former folder, which may be deleted."""
    folders = [write_gpt(tmp_path / f"{n}", seed=n) for n in range(2)]
    with serving(folders[0]) as engine:
        engine.exchange(folders[1])
        maps = Path(f"/proc/{os.getpid()}/maps").read_text()
        assert str(folders[0]) not in maps
        assert FTReader(folders[1]).config == engine.config
