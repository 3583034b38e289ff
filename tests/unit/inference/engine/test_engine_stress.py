"""Many clients at once with mixed requests, streams, sessions and sudden leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from inference.decoding.request import parse_request
from inference.decoding.rows import GenerationRequest, SessionTurn
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.engine.sequence import GenerationStep
from inference.ranks.settings import Placement
from tests.ft_folders import write_gpt

CLIENTS, REQUESTS, SLOTS = 32, 5, 7
WAIT_S = 60
KINDS: list[dict[str, Any]] = [
    {},
    {"runtime_top_k": np.uint32(9), "random_seed": np.uint64(3)},
    {"runtime_top_p": np.float32(0.8), "temperature": np.float32(0.7)},
    {"beam_width": np.uint32(3)},
    {"repetition_penalty": np.float32(1.4), "min_length": np.int32(3)},
    {"is_return_log_probs": np.bool_(True), "is_return_context_cum_log_probs": np.bool_(True)},
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    # A bound this small cuts every prompt into the least chunks.
    options = EngineOptions(max_lanes=SLOTS, max_stall_s=1e-6)
    ft_dir = write_gpt(tmp_path_factory.mktemp("gpt"))
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        yield engine


def request_of(engine: Engine, number: int, **more: Any) -> GenerationRequest:
    """Return one of the mixed requests; the same number gives the same one."""
    generator = np.random.default_rng(number)
    rows, width = int(generator.integers(1, 3)), int(generator.integers(1, 40))
    lengths = generator.integers(1, width + 1, (rows, 1))
    options = KINDS[number % len(KINDS)] | more
    tensors = {
        "input_ids": generator.integers(0, 50, (rows, width)).astype(np.uint32),
        "input_lengths": lengths.astype(np.uint32),
        "request_output_len": generator.integers(1, 12, (rows, 1)).astype(np.uint32),
        **{name: np.full((rows, 1), value) for name, value in options.items()},
    }
    return parse_request(tensors, limits=engine.limits)


def tokens_of(engine: Engine, number: int) -> list[Any]:
    return [row.output_ids for row in engine.generate(request_of(engine, number)).rows]


def settled(engine: Engine) -> bool:
    """Return whether everything that was given up has been freed: one more step sees to it."""
    engine.generate(request_of(engine, 0))
    return engine.load().running == 0 and engine.queued_rows == 0


@pytest.mark.soak
def test_mixed_clients_get_the_answers_of_single_ones(engine: Engine, soak: int) -> None:
    numbers = range(CLIENTS * REQUESTS)
    alone = {number: tokens_of(engine, number) for number in numbers}

    def client(start: int) -> None:
        for number in range(start, start + REQUESTS):
            steps: list[GenerationStep] = []
            request = request_of(engine, number)
            streams = number % 2 == 0
            future = engine.submit(request, on_step=steps.append if streams else None)
            if number % 7 == 3:
                future.cancel()
                continue
            rows = future.result(WAIT_S).rows
            assert [row.output_ids for row in rows] == alone[number], number

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, [*range(0, len(numbers), REQUESTS)] * soak))
    assert settled(engine)


@pytest.mark.soak
def test_clients_that_leave_in_the_middle_free_everything(engine: Engine, soak: int) -> None:
    expected = tokens_of(engine, 1)
    for number in range(40 * soak):
        begun = threading.Event()

        def note(_step: GenerationStep, begun: threading.Event = begun) -> None:
            begun.set()

        future = engine.submit(request_of(engine, number), on_step=note)
        if number % 2:
            begun.wait(0.01)
        future.cancel()
        if not future.done() or future.cancelled():
            with pytest.raises(CancelledError):
                future.result(WAIT_S)
    assert tokens_of(engine, 1) == expected
    assert settled(engine)


def test_sessions_survive_a_storm_of_requests(engine: Engine) -> None:
    start = request_of(engine, 0, session_len=np.uint32(75))
    first = engine.generate(start, turn=SessionTurn(1, starts=True))
    storm = [engine.submit(request_of(engine, number)) for number in range(60)]
    for future in storm[::2]:
        future.cancel()
    turn = engine.submit(request_of(engine, 0), turn=SessionTurn(1, ends=True))
    whole = turn.result(WAIT_S).request.rows
    for row, answer, new in zip(whole, first.rows, start.rows, strict=True):
        kept = answer.output_ids[0][: -1 if answer.finish_reasons[0] != "length" else None]
        assert row.returned_ids == new.returned_ids + kept + new.returned_ids
    for future in storm[1::2]:
        assert future.result(WAIT_S).rows
    assert settled(engine)
