"""The engine on one rank: batches of mixed rows, streaming, cancelling, refusing, failing."""

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.families.layout.architecture import DecoderArchitecture
from export_scripts.ft.config_ini import read_config
from inference.decoding.rows import GenerationRequest, RequestError
from inference.engine import capacity
from inference.engine.capacity import Capacity, plan_capacity
from inference.engine.engine import Engine
from inference.engine.errors import EngineBusyError, EngineFailedError
from inference.engine.options import EngineOptions
from inference.engine.sequence import GenerationStep
from inference.model.token_feed import marks_bytes
from inference.ranks.decoder_rank import DecoderRank
from inference.ranks.plan import StepPlan
from inference.ranks.settings import Placement, RankSettings
from tests.contract import request_of
from tests.ft_folders import write_gpt

SLOTS = 6


@pytest.fixture(scope="module")
def ft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpt(tmp_path_factory.mktemp("gpt"))


@pytest.fixture(scope="module")
def engine(ft_dir: Path) -> Iterator[Engine]:
    with Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(max_lanes=SLOTS)) as engine:
        yield engine


def answers(engine: Engine, request: GenerationRequest) -> list[tuple[int, ...]]:
    return [row.output_ids[0] for row in engine.generate(request).rows]


def prompts_of(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [list(map(int, generator.integers(0, 50, 1 + 3 * b))) for b in range(count)]


def test_new_tokens_make_up_the_answers_but_for_the_last_step(engine):
    news: list[list[Sequence[int]]] = []
    request = request_of(engine, prompts_of(3), 8, end_id=52)
    result = engine.submit(request, on_step=news.append, only_tokens=True).result()
    answers_so_far = [tuple(itertools.chain(*row)) for row in zip(*news, strict=True)]
    whole = [row.output_ids[0] for row in result.rows]
    longest = max(map(len, whole))
    assert answers_so_far == [ids[: longest - 1] for ids in whole]
    assert all(len(row) <= 1 for step in news for row in step)


def test_a_streamed_row_takes_no_step_more_than_its_tokens(engine):
    before = engine.steps
    request = request_of(engine, [[3, 9, 4, 1, 7]], 8, min_length=8)
    engine.submit(request, on_step=lambda _: None).result()
    assert engine.steps - before == 8


def test_a_request_whose_listener_has_enough_ends_with_what_it_has(engine):
    request = request_of(engine, [[3, 9, 4], [1, 7]], 8, min_length=8)
    times = engine.submit(request, on_step=lambda _: True).result().times
    assert times is not None
    assert times.reasons == ("stop", "stop")
    assert times.steps < 4


def test_after_a_step_all_of_it_has_been_reported(engine, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(engine, "after_step", lambda: seen.append("|"))
    requests = [request_of(engine, [[3, 9]], 5, min_length=5) for _ in range(3)]
    futures = [engine.submit(each, on_step=lambda _: seen.append(".")) for each in requests]
    for future in futures:
        future.result()
    reports = "".join(seen).split("|")
    assert sum(map(len, reports)) == 3 * 4  # the last step's tokens are the answers
    assert max(map(len, reports)) <= 3


def test_a_failing_listener_costs_only_its_own_request(engine):
    def fail(step: GenerationStep) -> None:
        raise ValueError("listener broke")

    good = engine.submit(request_of(engine, [[1, 2]], 20))
    bad = engine.submit(request_of(engine, [[3, 4]], 20), on_step=fail)
    with pytest.raises(ValueError, match="listener broke"):
        bad.result(10)
    assert len(good.result(10).rows) == 1


def test_a_failed_step_leaves_no_answer_that_reads_what_it_did_not_store(
    engine, ft_dir, monkeypatch
):
    prompts = [[*range(1, 25), last] for last in (20, 21, 22)]
    alone = [answers(engine, request_of(engine, [prompt])) for prompt in prompts]
    # A step takes 16 tokens, once one is measured: those of two prompts of three.
    options = replace(paged_options(40, block_tokens=4), max_stall_s=1e-9)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as paged:
        assert answers(paged, request_of(paged, [[50] * 20], 1))
        run = DecoderRank.run
        steps: list[StepPlan] = []

        def fail_once(rank: DecoderRank, plan: StepPlan, embeddings: Any = None) -> Any:
            steps.append(plan)
            if len(steps) == 1:
                raise MemoryError("no memory for a step")
            return run(rank, plan, embeddings)

        monkeypatch.setattr(DecoderRank, "run", fail_once)
        with paged._wake:  # they come together
            sent = [paged.submit(request_of(paged, [prompt])) for prompt in prompts]
        for future, expected in zip(sent, alone, strict=True):
            error = future.exception(10)
            if error is None:
                assert [row.output_ids[0] for row in future.result().rows] == expected
            else:
                assert str(error) == "no memory for a step"
        assert {segment.slot for segment in steps[0].segments} == {0, 1}
        assert paged.load().blocks_used == 0


def test_full_queue_refuses_with_its_size(ft_dir):
    options = EngineOptions(max_lanes=1, max_queued_rows=3)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        refused = threading.Event()  # until then the engine stays in its first step
        running = engine.submit(
            request_of(engine, [[1]], 70), on_step=lambda _step: refused.wait(60)
        )
        while engine.queued_rows:
            time.sleep(0.01)
        waiting = [engine.submit(request_of(engine, [[2]], 1)) for _ in range(3)]
        with pytest.raises(
            EngineBusyError, match="max_queued_rows=3; send the request again later"
        ):
            engine.submit(request_of(engine, [[3]], 1))
        refused.set()
        running.cancel()
        assert [len(future.result(10).rows) for future in waiting] == [1, 1, 1]


def test_request_longer_than_a_slot_is_refused(ft_dir):
    options = EngineOptions(max_seq_len=16)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        assert engine.generate(request_of(engine, [[1] * 10], 7)).rows
        with pytest.raises(RequestError, match=r"exceeds the 16 tokens that .*; raise max_seq_len"):
            engine.submit(request_of(engine, [[1] * 10], 8))


def test_beams_beyond_the_slots_are_refused(engine):
    with pytest.raises(RequestError, match=r"beam_width=7: rows need 7 sequences, .* holds 6;"):
        engine.submit(request_of(engine, [[1]], 1, beam_width=7))


def paged_options(blocks: int, *, block_tokens: int) -> EngineOptions:
    """Return the options of a cache of so many blocks, for sequences of 32 tokens."""
    token_bytes = 2 * 2 * 4 * 6 * 4  # keys and values, layers, heads, head size, fp32
    cache_bytes = (blocks + 1) * block_tokens * token_bytes
    return EngineOptions(max_seq_len=32, kv_block_tokens=block_tokens, kv_cache_bytes=cache_bytes)


def test_beams_need_the_blocks_of_their_prompt_once(ft_dir):
    options = paged_options(8, block_tokens=4)
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        # Two blocks of the prompt, and two of each beam's answer.
        assert engine.generate(request_of(engine, [[1] * 8], 9, beam_width=3)).rows
        message = r"beam_width=4: rows need 40 cached tokens, .* holds 32; "
        with pytest.raises(RequestError, match=message):
            engine.submit(request_of(engine, [[1] * 8], 9, beam_width=4))
        assert engine.load().blocks_used == 0


def test_stopping_fails_the_requests_in_flight(ft_dir):
    engine = Engine(ft_dir, Placement(device="cpu"))
    with pytest.raises(EngineFailedError, match="not started"):
        engine.submit(request_of(engine, [[1]], 1))
    engine.start()
    future = engine.submit(request_of(engine, [[1]], 70), on_step=lambda _step: time.sleep(0.1))
    engine.stop()
    with pytest.raises(EngineFailedError, match="the engine was stopped"):
        future.result(5)
    assert engine.healthy() == "the engine was stopped"


@pytest.mark.parametrize(
    ("options", "beams"), [(EngineOptions(max_lanes=2), 1), (paged_options(18, block_tokens=2), 3)]
)
def test_unusable_logits_fail_one_row_and_nothing_else(options, beams, tmp_path):
    ft_dir = write_gpt(tmp_path, tie_word_embeddings=False)
    table = np.fromfile(ft_dir / "model.wte.bin", np.float32).reshape(53, 24)
    table[50] = 3e38  # finite on disk; squares overflow in the first layer
    table.tofile(ft_dir / "model.wte.bin")
    with Engine(ft_dir, Placement(device="cpu"), options=options) as engine:
        good = request_of(engine, [[1, 2, 3]], 10)
        expected = answers(engine, good)
        for _ in range(3):
            bad = engine.submit(request_of(engine, [[50, 50]], 4, beam_width=beams))
            other = engine.submit(good)
            with pytest.raises(RuntimeError, match="not finite"):
                bad.result(10)
            assert [row.output_ids[0] for row in other.result(10).rows] == expected
        assert answers(engine, request_of(engine, [[1, 2, 3], [1, 2, 3]], 10)) == expected * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 3}, "tensor_para_size=3 does not divide head_num=4"),
        ({"pp_size": 3}, r"pipeline_para_size=3 does not divide num_layer=2; use 1, 2"),
        ({"tp_size": 0}, "tensor_para_size=0 must be at least 1"),
        ({"pp_size": -1}, "pipeline_para_size=-1 must be at least 1"),
        ({"data_type": "fp8"}, "data_type='fp8' must be one of fp32, fp16, bf16"),
        ({"int8_mode": 2}, "int8_mode=2 is not supported; use 0, or 1 for weights of 8 bits"),
        ({"int8_mode": 1, "fp8": True}, "int8_mode=1 and fp8=1 are two forms of the same matrices"),
        ({"fp8": True}, "fp8=1 needs a GPU and data_type fp16 or bf16; the device is cpu"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' must be one of auto, fp8_e4m3"),
        ({"batch_invariant": True}, "batch_invariant=1 needs a GPU and data_type fp16"),
        ({"device": "tpu"}, "device='tpu' must be auto, cpu or cuda"),
    ],
)
def test_invalid_placements_are_refused_before_loading(ft_dir, arguments, message):
    with pytest.raises(ValueError, match=message):
        Engine(ft_dir, Placement(**{"device": "cpu", **arguments}))


def test_a_budget_too_small_for_one_sequence_is_refused(ft_dir):
    with pytest.raises(ValueError, match="kv_cache_bytes=1000 cannot hold one"):
        Engine(ft_dir, Placement(device="cpu"), options=EngineOptions(kv_cache_bytes=1000))


@pytest.mark.parametrize(("computed", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_a_cache_on_a_cpu_has_the_type_of_computation(ft_dir, computed, size, monkeypatch):
    monkeypatch.setattr(capacity, "compute_dtype", lambda *_: computed)
    options = EngineOptions(max_seq_len=32, max_lanes=3)
    engine = Engine(ft_dir, Placement(device="cpu", data_type="bf16"), options=options)
    tokens = 4 * 32  # of three sequences, and of a block that takes padding
    assert engine.capacity.cache_bytes == tokens * 2 * 2 * 4 * 6 * size


@pytest.mark.parametrize("wanted", [None, 1 << 20])
def test_a_model_that_the_gpu_cannot_hold_is_refused_with_the_sizes(ft_dir, wanted, monkeypatch):
    _, config = read_config(ft_dir)
    weights = sum(path.stat().st_size for path in ft_dir.iterdir()) // 2  # computed in fp16
    settings = RankSettings(ft_dir=str(ft_dir), rank=0, threads=1, data_type="fp16", device="cuda")
    options = EngineOptions(kv_cache_bytes=wanted, max_seq_len=64, max_lanes=3)
    architecture = config.architecture()
    assert isinstance(architecture, DecoderArchitecture)
    marks = marks_bytes(3, architecture.vocab_size) + 3 * 4 * architecture.vocab_size

    def plan(free: int) -> Capacity:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1 << 40))
        return plan_capacity(architecture, settings, options)

    assert plan(weights + marks + (1 << 20)).cache_bytes <= 1 << 20
    for free in (weights + 1000, weights + (wanted or 0) + marks - 1):
        with pytest.raises(ValueError, match=r"each GPU must hold 0.0 GiB of weights, .* are free"):
            plan(free)


def test_keys_and_values_leave_a_gpu_room_for_the_largest_step(tmp_path, monkeypatch):
    ft_dir = write_gpt(tmp_path, inter_size=512)
    settings = RankSettings(ft_dir=str(ft_dir), rank=0, threads=1, data_type="fp16", device="cuda")
    architecture = read_config(ft_dir)[1].architecture()
    assert isinstance(architecture, DecoderArchitecture)
    work = 8192 * 2 * (4 * architecture.hidden + 3 * 512)
    for free in (2 * work, 10 * work):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 1 << 40))
        budget = plan_capacity(architecture, settings, EngineOptions(max_seq_len=64)).cache_bytes
        assert budget < free - work


def test_weights_that_are_not_finite_fail_the_start(tmp_path):
    ft_dir = write_gpt(tmp_path)
    for name in ("model.final_layernorm.bias.bin", "model.layers.1.mlp.dense_h_to_4h.bias.0.bin"):
        values = np.fromfile(ft_dir / name, np.float32)
        values[3] = np.nan
        values.tofile(ft_dir / name)
    with pytest.raises(EngineFailedError) as error:
        Engine(ft_dir, Placement(device="cpu")).start()
    assert "model.final_layernorm.bias holds values that are not finite" in str(error.value)
    assert "model.layers.1.mlp.dense_h_to_4h.bias holds" in str(error.value)
