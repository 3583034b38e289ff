"""The engine on an encoder-decoder: mixed batches, beams, tuned rows, streaming, cancelling."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from export_scripts.conversion.convert import ConversionRequest, convert
from inference.decoding.rows import GenerationRequest, RequestError
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.engine.sequence import GenerationStep
from inference.ranks.settings import Placement
from tests.contract import request_of
from tests.t5_reference import Reference
from tests.tiny_t5 import TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import ia3_scalers, write_ia3, write_prompts
from tests.unit.inference.engine.fake_ranks import let_ranks_choose

MODEL = TinyT5(positions=2100)
SLOTS = 7
TENSORS = t5_tensors(MODEL)
TASKS = [ia3_scalers(MODEL, seed=seed) for seed in (1, 2)]
TABLES = {"first": torch.randn(3, 20), "second": torch.randn(4, 20)}
FIRST_VIRTUAL = MODEL.vocab_size


@pytest.fixture(scope="module")
def ft_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("t5")
    source = write_t5(folder / "t5.nemo", TENSORS, MODEL)
    tuned = {
        "ia3_checkpoints": tuple(
            write_ia3(folder / f"{n}.nemo", task, MODEL) for n, task in enumerate(TASKS)
        ),
        "prompt_checkpoints": (write_prompts(folder / "p.nemo", TABLES),),
    }
    return {
        tp_size: convert(
            ConversionRequest(source, folder / "out", tp_size, "fp32", **tuned)  # type: ignore[arg-type]
        ).ft_dir
        for tp_size in (1, 2)
    }


@pytest.fixture(scope="module")
def engine(ft_dirs: dict[int, Path]) -> Iterator[Engine]:
    options = EngineOptions(max_lanes=SLOTS)
    with Engine(ft_dirs[1], Placement(device="cpu"), options=options) as engine:
        yield engine


def answers(engine: Engine, request: GenerationRequest) -> list[tuple[int, ...]]:
    return [row.output_ids[0] for row in engine.generate(request).rows]


def prompts_of(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [list(map(int, generator.integers(4, 40, 1 + 2 * b))) for b in range(count)]


def greedy(
    prompt: Sequence[int],
    length: int,
    *,
    scalers: dict[str, torch.Tensor] | None = None,
    table: torch.Tensor | None = None,
) -> tuple[int, ...]:
    """Return what the plain forward pass generates, ending with the end token (3)."""
    reference = Reference(TENSORS, MODEL, scalers=scalers)
    encoded = reference.encode(prompt, table)
    tokens = [2]
    while len(tokens) <= length and (len(tokens) == 1 or tokens[-1] != 3):
        logits = reference.logits(encoded, tokens)[-1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4, "too close to call in fp32"
        tokens.append(int(logits.argmax()))
    return tuple(tokens[1:])


def test_ranks_that_choose_penalise_from_the_second_token_on(engine, ft_dirs, monkeypatch):
    # At a penalty of 0.01 the start token leads once it counts as seen.
    request = request_of(engine, prompts_of(9), 12, repetition_penalty=[1.6, 0.5, 0.01] * 3)
    expected = answers(engine, request)
    assert expected != answers(engine, request_of(engine, prompts_of(9), 12))
    let_ranks_choose(monkeypatch)
    options = EngineOptions(max_lanes=SLOTS)
    with Engine(ft_dirs[1], Placement(device="cpu"), options=options) as choosing:
        assert answers(choosing, request) == expected


def test_each_row_has_its_own_ia3_task(engine):
    prompt = prompts_of(6)[5]
    ours = answers(engine, request_of(engine, [prompt, prompt], 10, ia3_tasks=[1, 0]))
    assert ours == [greedy(prompt, 10, scalers=TASKS[1]), greedy(prompt, 10, scalers=TASKS[0])]
    assert answers(engine, request_of(engine, [prompt], 10)) == [greedy(prompt, 10)]


def test_an_ia3_task_does_not_stay_in_its_slot(engine):
    prompts = prompts_of(SLOTS, seed=4)
    engine.generate(request_of(engine, prompts, 3, ia3_tasks=1))
    assert answers(engine, request_of(engine, prompts, 6)) == [greedy(p, 6) for p in prompts]


def test_loaded_prompt_tables_are_chosen_by_task(engine):
    words = prompts_of(4)[3]
    tasks = {0: TABLES["first"], 1: TABLES["second"]}
    prompts = [[*range(FIRST_VIRTUAL, FIRST_VIRTUAL + len(t)), *words] for t in tasks.values()]
    request = request_of(engine, prompts, 8, prompt_learning_task_name_ids=list(tasks))
    expected = [greedy(p, 8, table=t) for p, t in zip(prompts, tasks.values(), strict=True)]
    assert answers(engine, request) == expected


def test_prompt_tables_come_with_the_request(engine):
    words, table = prompts_of(4)[3], torch.randn(2, 20)
    prompt = [FIRST_VIRTUAL, *words, FIRST_VIRTUAL + 1]
    request = request_of(
        engine,
        [prompt],
        8,
        request_prompt_embedding=table.numpy()[None],
        request_prompt_lengths=2,
    )
    assert answers(engine, request) == [greedy(prompt, 8, table=table)]


def test_each_step_of_a_stream_has_all_rows(engine):
    steps: list[GenerationStep] = []
    request = request_of(engine, prompts_of(4), 7)
    result = engine.submit(request, on_step=steps.append).result()
    longest = max(len(row.output_ids[0]) for row in result.rows)
    assert len(steps) == longest - 1
    for number, step in enumerate(steps, start=1):
        for row, final in zip(step.rows, result.rows, strict=True):
            assert row is not None
            assert row.output_ids[0] == final.output_ids[0][:number]


def test_positions_beyond_the_table_are_refused(engine):
    message = r"max_output_len\[0\]=2101 exceeds max_pos_seq_len \(2100\)"
    with pytest.raises(RequestError, match=message):
        engine.submit(request_of(engine, prompts_of(1), 2101))


def test_rows_longer_than_the_cache_are_refused(ft_dirs):
    engine = Engine(ft_dirs[1], Placement(device="cpu"), options=EngineOptions(max_seq_len=8))
    with pytest.raises(RequestError) as caught:
        engine.submit(request_of(engine, [[5] * 9], 12))
    assert "input_ids[0]=9 exceeds the 8 tokens that a sequence holds" in str(caught.value)
    assert "max_output_len[0]=12 exceeds the 8 tokens" in str(caught.value)


def test_a_long_limit_costs_nothing_until_it_is_used(ft_dirs):
    token_bytes = 2 * MODEL.decoder_layers * MODEL.inner * 4
    short, long, whole = (
        Engine(
            ft_dirs[1],
            Placement(device="cpu"),
            options=EngineOptions(
                max_lanes=64,
                max_seq_len=length,
                kv_block_tokens=tokens,
                # Input and answer of the longest sequence, and a block of the cache's own.
                kv_cache_bytes=(2 * 1024 + 16) * token_bytes,
            ),
        ).capacity
        for length, tokens in ((64, 16), (1024, 16), (64, 64))
    )
    assert (long.slots, long.tokens, long.cache_bytes) == (64, 2048, (2048 + 16) * token_bytes)
    assert long == replace(short, max_len=1024)
    assert (whole.slots, whole.blocks, whole.block_tokens) == (15, 15 * 2, 64)


def test_long_rows_pass_the_encoder_in_slices(ft_dirs, engine):
    prompts = [[5] * 300, *prompts_of(5), list(range(4, 40)) * 8]
    request = request_of(engine, prompts, 20)
    options = EngineOptions(max_lanes=SLOTS, max_stall_s=1e-9)  # the fewest encoder tokens
    with Engine(ft_dirs[1], Placement(pp_size=2, device="cpu"), options=options) as slicing:
        assert answers(slicing, request) == answers(engine, request)
