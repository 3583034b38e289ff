"""64 clients at once with seeded sampling of every kind: each gets the answer it gets alone."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.decoding.rows import GenerationRequest
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests import contract
from tests.conftest import ROOT

CLIENTS = 64
REQUESTS = 36
OUTPUT_LEN = 16
WAIT_S = 600
SOAK_SECONDS = 1.8  # times 100 in `make soak`
# Seeded all of them; the random ones differ in what they may choose from and how that is cut.
KINDS: list[dict[str, Any]] = [
    {"runtime_top_p": 0.9},
    {"runtime_top_p": 0.5, "temperature": 1.3},
    {"runtime_top_p": 0.95, "top_p_decay": 0.9},
    {"runtime_top_k": 40},
    {"runtime_top_k": 200, "runtime_top_p": 0.8},
    {"runtime_top_k": 20, "temperature": 0.7},
    {"runtime_top_p": 1.0, "repetition_penalty": 1.2},
    {"beam_width": 3},
    {},
]


@pytest.fixture(scope="module", params=["fp32", pytest.param("fp16", marks=pytest.mark.long)])
def ft_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model's shards of either type."""
    return convert(
        ConversionRequest(
            checkpoint_path=ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo",
            output_dir=Path(tmp_path_factory.mktemp("weights")),
            tp_size=1,
            weight_data_type=request.param,
        )
    ).ft_dir


@pytest.fixture(scope="module")
def engine(ft_dir: Path) -> Iterator[Engine]:
    """Yields the model computed in fp32."""
    options = EngineOptions(max_lanes=CLIENTS, threads=1)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        yield engine


def request_of(engine: Engine, number: int) -> GenerationRequest:
    """Return a request; the same number gives the same one."""
    generator = np.random.default_rng(number)
    length = int(generator.integers(1, 40))
    prompt = generator.integers(0, 2000, length).tolist()
    return contract.request_of(
        engine, [prompt], OUTPUT_LEN, random_seed=number, **KINDS[number % len(KINDS)]
    )


def answer(engine: Engine, number: int) -> list[Any]:
    result = engine.submit(request_of(engine, number)).result(WAIT_S)
    return [row.output_ids for row in result.rows]


def test_two_threads_answer_as_one_does(engine, ft_dir):
    numbers = range(2)
    expected = [answer(engine, number) for number in numbers]
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(threads=2)) as other:
        assert [answer(other, number) for number in numbers] == expected


@pytest.mark.soak
def test_neighbours_change_no_sampled_answer(engine, soak):
    alone = [answer(engine, number) for number in range(REQUESTS)]
    until = time.monotonic() + SOAK_SECONDS * soak
    turn = 0
    with ThreadPoolExecutor(CLIENTS) as clients:
        while turn == 0 or time.monotonic() < until:
            # Another order each time, so that requests meet others.
            order = np.random.default_rng(turn).permutation(REQUESTS)
            together = clients.map(lambda number: answer(engine, int(number)), order)
            changed = [
                int(number)
                for number, tokens in zip(order, together, strict=True)
                if tokens != alone[number]
            ]
            assert not changed, f"{len(changed)} of {REQUESTS} in turn {turn}: {sorted(changed)}"
            turn += 1
