"""The runtime on a GPU gives what it gives on a CPU, through CUDA graphs and without."""

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from export_scripts.families.dense.layout import DENSE, DenseConfig
from export_scripts.families.gpt.layout import GPT
from export_scripts.families.gptj import GPTJ, GPTJConfig
from export_scripts.families.gptneox import GPTNEOX, GPTNeoXConfig
from export_scripts.families.layout.spec import ModelFamily
from inference.decoding.rows import GenerationRequest, SequenceRequest
from inference.decoding.sampling_params import SamplingParams
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.model.gpu.recording import SizedGraphs, record_graph
from inference.model.token_feed import TokenFeed
from inference.ranks.settings import Placement
from tests.engine_logits import prompt_logits
from tests.ft_folders import gpt_config, write_random
from tests.looks import relative_error
from tests.reference_choice import draw_by_sorting

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "model_name": "tiny",
    "head_num": 4,
    "size_per_head": 8,
    "inter_size": 56,
    "num_layer": 3,
    "vocab_size": 53,
    "start_id": 51,
    "end_id": 52,
    "weight_data_type": "fp32",
}
DENSE_SIZES: dict[str, Any] = {
    **SIZES,
    "kv_head_num": 2,
    "hidden_size": 32,
    "max_pos_seq_len": 80,
    "layernorm_eps": 1e-5,
    "rotary_embedding": 8,
}
MODELS: dict[str, tuple[ModelFamily, Any]] = {
    "gpt": (GPT, gpt_config(size_per_head=8)),
    "opt": (GPT, gpt_config(layernorm_type="post_layernorm", activation_type="Relu")),
    "bloom": (
        GPT,
        gpt_config(
            max_pos_seq_len=None,
            has_positional_encoding=False,
            has_pre_decoder_layernorm=True,
            use_attention_linear_bias=True,
        ),
    ),
    "gptj": (GPTJ, GPTJConfig(**SIZES, rotary_embedding=4)),
    "gptneox": (GPTNEOX, GPTNeoXConfig(**SIZES, rotary_embedding=4)),
    "llama": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            sliding_window=9,
        ),
    ),
    "gemma3": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            norm_one_plus=True,
            has_output_norms=True,
            query_key_norm="head",
            activation_type="geglu",
            tie_word_embeddings=True,
            attention_scale=0.4,
            attention_softcap=3.0,
            logit_softcap=5.0,
            embedding_scale=6.0,
            sliding_window=9,
            sliding_layers=(0, 2),
            rotary_local_base=100.0,
        ),
    ),
    "olmo2": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES, has_input_norms=False, has_output_norms=True, query_key_norm="all"
        ),
    ),
    "glm4": (DENSE, DenseConfig(**DENSE_SIZES, has_output_norms=True, rotary_interleaved=True)),
    "hunyuan": (
        DENSE,
        DenseConfig(**DENSE_SIZES, query_key_norm="head", query_key_norm_rotated=True),
    ),
    "apertus": (DENSE, DenseConfig(**DENSE_SIZES, activation_type="xielu")),
    "ministral3": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            rotary_scaling_type="yarn",
            rotary_factor=2.0,
            rotary_original_max_position_embeddings=4,
            rotary_llama_4_scaling_beta=0.5,
        ),
    ),
    "granite": (
        DENSE,
        DenseConfig(**DENSE_SIZES, residual_scale=0.4, logit_scale=0.3, rotary_layers=(0, 1)),
    ),
    "nemotron": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES, norm_type="layernorm", norm_one_plus=True, activation_type="relu2"
        ),
    ),
    "falcon": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            norm_type="layernorm",
            residual="parallel",
            activation_type="gelu",
            exact_gelu=True,
        ),
    ),
    "gpt_neo": (
        DENSE,
        DenseConfig(
            **{**DENSE_SIZES, "rotary_embedding": 0},
            norm_type="layernorm",
            has_positional_encoding=True,
            attention_scale=1.0,
            sliding_window=9,
            sliding_layers=(1,),
            activation_type="gelu",
            has_mlp_bias=True,
        ),
    ),
    "phi": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            norm_type="layernorm",
            residual="parallel_shared",
            query_key_norm="head",
            activation_type="gelu",
            has_head_bias=True,
            has_qkv_bias=True,
            has_attention_dense_bias=True,
            has_mlp_bias=True,
        ),
    ),
    "stablelm": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES, norm_type="layernorm", has_norm_bias=False, query_key_norm="heads"
        ),
    ),
    "phi3": (
        DENSE,
        DenseConfig(
            **DENSE_SIZES,
            rotary_scaling_type="longrope",
            rotary_original_max_position_embeddings=20,
            rotary_attention_factor=1.2,
            rotary_short_factor=(1.0, 1.1, 1.2, 1.3),
            rotary_long_factor=(1.0, 2.0, 3.0, 4.0),
        ),
    ),
}
# Relative to the largest logit: order of sums; 20 units of fp16's 2**-11 and 15 of bf16's 2**-8,
# the rounding of the numbers between three layers' products.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}
PROMPT = [7, 3, 11, 2, 40, 17, 5]


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")


def make_request(lengths: list[int], beam_width: int = 1) -> GenerationRequest:
    rows = []
    for number, length in enumerate(lengths):
        ids = tuple((7 * number + 3 * t) % 50 for t in range(1 + 2 * number))
        options = SamplingParams(end_id=52, beam_width=beam_width, return_log_probs=True)
        rows.append(SequenceRequest(ids, length, options, context_ids=ids, returned_ids=ids))
    return GenerationRequest(tuple(rows), padded_len=1 + 2 * len(lengths))


@pytest.mark.parametrize("data_type", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_cpu(name, data_type, tmp_path):
    ft_dir = write_random(*MODELS[name], tmp_path)
    with (
        Engine(ft_dir, Placement(device="cpu")) as cpu,
        Engine(ft_dir, Placement(device="cuda", data_type=data_type)) as cuda,
    ):
        expected, logits = prompt_logits(cpu, PROMPT), prompt_logits(cuda, PROMPT)
    assert relative_error(logits, expected) < TOLERANCE[data_type]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_mixed_batches_and_beams_equal_those_of_the_cpu(name, tmp_path):
    ft_dir = write_random(*MODELS[name], tmp_path)
    options = EngineOptions(max_lanes=6)
    with (
        Engine(ft_dir, Placement(device="cpu"), options=options) as cpu,
        Engine(ft_dir, Placement(device="cuda"), options=options) as cuda,
    ):
        for request in (
            make_request([20]),
            make_request([3, 20, 7, 11, 1, 30, 5, 9, 14]),
            make_request([12, 9], beam_width=3),
        ):
            expected, rows = cpu.generate(request).rows, cuda.generate(request).rows
            assert [row.output_ids for row in rows] == [row.output_ids for row in expected]


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
@pytest.mark.parametrize("form", [{"int8_mode": 1}, {"fp8": True}])
def test_eight_bit_weights_stay_close(form, data_type, tmp_path):
    ft_dir = write_random(*MODELS["gptj"], tmp_path)
    request = make_request([9, 5, 7])
    with (
        Engine(ft_dir, Placement(device="cpu")) as exact,
        Engine(ft_dir, Placement(device="cuda", data_type=data_type, **form)) as small,
    ):
        expected = prompt_logits(exact, PROMPT * 10)
        for length in (7, 28, 64, 70):
            error = prompt_logits(small, (PROMPT * 10)[:length]).cpu() - expected[:length]
            # 12 quantised products add some 1% each in int8, 4% in FP8, and 8 bits of bf16 between.
            assert error.norm() / expected[:length].norm() < (0.2 if "fp8" in form else 0.1)
        assert len(small.generate(request).rows) == 3


@pytest.mark.parametrize("data_type", ["fp16", "bf16"])
@pytest.mark.parametrize("group", [0, 128, 96])  # the last is widened
def test_folders_in_fp8_are_computed_as_they_are(group, data_type, tmp_path):
    sizes = {"head_num": 4, "size_per_head": 64, "hidden_size": 256, "inter_size": 384}
    config = DenseConfig(**{**DENSE_SIZES, **sizes, "fp8_group_size": group}, has_qkv_bias=True)
    ft_dir = write_random(DENSE, config, tmp_path, scale=0.05)
    request = make_request([9, 5, 7])
    with (
        Engine(ft_dir, Placement(device="cpu")) as exact,
        Engine(ft_dir, Placement(device="cuda", data_type=data_type, fp8=True)) as small,
        Engine(ft_dir, Placement(device="cuda", data_type=data_type)) as wide,
    ):
        expected = prompt_logits(exact, PROMPT * 10)
        for length in (1, 7, 28, 70):
            for engine in (small, wide):
                error = prompt_logits(engine, (PROMPT * 10)[:length]).cpu() - expected[:length]
                rounds = engine is small and not group and length > 1  # graphs of prompts pad
                bound = 0.2 if rounds else {"fp16": 5e-3, "bf16": 4e-2}[data_type]
                assert error.norm() / expected[:length].norm() < bound, (length, rounds)
        assert len(small.generate(request).rows) == 3


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_in_fp8_are_those_of_the_cpu(name, tmp_path):
    ft_dir = write_random(*MODELS[name], tmp_path)
    forms: list[dict[str, Any]] = [
        {"device": "cpu"}, {"device": "cuda", "data_type": "fp16"}, {"device": "cuda"},
    ]  # fmt: skip
    found = []
    for form in forms:
        placement = Placement(kv_cache_dtype="fp8_e4m3", **form)
        with Engine(ft_dir, placement, options=EngineOptions(max_seq_len=80)) as engine:
            found.append(prompt_logits(engine, PROMPT * 10).cpu())
            answers = engine.generate(make_request([9, 5, 7, 20])).rows
            assert [row.output_ids[0] for row in answers]
    with Engine(ft_dir, Placement(device="cpu")) as engine:
        exact = prompt_logits(engine, PROMPT * 10)
    cpu, *others = found
    rounding = (cpu - exact).norm() / exact.norm()
    assert 1e-4 < rounding < 0.2
    for each in others:  # a number between two of FP8's may be rounded either way
        assert (each - cpu).norm() / cpu.norm() < 0.7 * rounding + 1e-2


@pytest.mark.parametrize("form", [{}, {"int8_mode": 1}, {"fp8": True}])
@pytest.mark.parametrize("name", MODELS)
def test_batch_invariant_answers_do_not_depend_on_other_requests(name, form, tmp_path):
    ft_dir = write_random(*MODELS[name], tmp_path)
    placement = Placement(device="cuda", data_type="fp16", batch_invariant=True, **form)
    block = 2 * 3 * 32 * 2 * 16  # bytes of 16 tokens' keys and values
    requests = [make_request([20]), *(make_request([3 + n % 30, 9 + n % 7]) for n in range(32))]
    # Few blocks and short chunks of prompts: sequences are preempted, and compute tokens again.
    options = EngineOptions(
        max_lanes=64, max_seq_len=80, max_stall_s=1e-3, kv_cache_bytes=40 * block
    )
    with Engine(ft_dir, placement, options=options) as engine:
        alone = [engine.generate(request).rows for request in requests]
        together = [engine.submit(request) for request in requests]
        for expected, answer in zip(alone, together, strict=True):
            for row, other in zip(expected, answer.result().rows, strict=True):
                assert other.output_ids == row.output_ids
                assert other.output_log_probs == row.output_log_probs


def test_best_tokens_equal_those_of_the_cpu():
    torch.manual_seed(0)
    vocab = range(7, 20_007)
    logits = torch.randn(6, len(vocab)).round(decimals=1)  # many are equal
    logits[4] = float("-inf")
    choices = torch.tensor([[n, 7 + int(row.argmax())] for n, row in enumerate(logits)])
    slots, forbidden = choices.t()  # not side by side
    expected, ours = (
        TokenFeed(8, torch.device(device), vocab=vocab).choose(
            logits.to(device, copy=True), slots.to(device), forbidden.to(device)
        )
        for device in ("cpu", "cuda")
    )
    assert ours.tolist() == expected.tolist()
    logits[2, 5] = float("nan")
    spoilt = TokenFeed(8, torch.device("cuda"), vocab=vocab).choose(
        logits.cuda(), slots.cuda(), forbidden.cuda()
    )
    assert spoilt[:, 0].view(torch.float32).isnan().tolist() == [n == 2 for n in range(6)]


@pytest.mark.parametrize("vocab_size", [1, 53, 20_011])
@pytest.mark.parametrize("kind", ["smooth", "ties", "flat", "banned", "marked"])
def test_drawn_tokens_equal_those_of_the_cpu(vocab_size, kind):
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 256
    logits = 4 * torch.randn(rows, vocab_size, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":  # more than a row lists
        logits /= 100
    elif kind == "banned":
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
        logits[:, vocab_size // 2] = 1.0
    draws = torch.rand(rows, 6, generator=generator)
    draws[:, 0] = torch.tensor([1.0, 0.5, 2.0])[torch.arange(rows) % 3]
    draws[:, 1] = torch.tensor([0.0, 0.0, 1.0, 2.0, 50.0, 1024.0, 0.0])[torch.arange(rows) % 7]
    draws[::5, 2] = 1.0
    draws[:, 3] = 1e-6
    draws[:, 4] = torch.arange(rows) % 2
    forbidden = torch.randint(-1, vocab_size + 2, (rows,), generator=generator)
    slots = torch.arange(rows)
    penalties = seen = bias = None
    if kind == "marked":
        penalties = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [0.7, 0, 0.2], [1.0, 0.8, 0]])
        penalties = penalties[torch.arange(rows) % 4]
        seen = torch.randint(2, (rows, vocab_size), generator=generator, dtype=torch.uint8)
        bias = torch.randn(rows, vocab_size, generator=generator)
        bias[torch.rand(bias.shape, generator=generator) < 0.3] = -torch.inf
    feed = marked_feed(seen, bias, rows, vocab_size)
    given = [logits, slots, forbidden, draws, *([] if penalties is None else [penalties])]
    chosen = feed.choose(*(each.cuda() for each in given))

    def drawn(more: float, inside: float) -> torch.Tensor:
        near = draws.clone()
        near[:, 5] = (near[:, 5] + more).clamp(1e-9, 1)
        near[:, 2] = (near[:, 2] + inside).clamp(1e-9, 1)
        return draw_by_sorting(logits.clone(), forbidden, near, penalties, seen, bias)

    # Closer to the boundary of two tokens, or of the nucleus, the sums' rounding decides.
    exact, *near = (drawn(*by) for by in ((0, 0), (-1e-5, 0), (1e-5, 0), (0, -1e-5), (0, 1e-5)))
    usable = exact[:, 0].view(torch.float32).isfinite()
    ours = chosen.cpu()
    assert ours[:, 0].tolist() == exact[:, 0].tolist()
    allowed = torch.stack([each[:, 1] for each in (exact, *near)])
    assert (allowed == ours[:, 1]).any(0)[usable].all()
    assert (exact == ours).all(1)[usable].float().mean() > 0.98
    ids = feed.ids(torch.full((rows,), -1).cuda(), slots.cuda())
    assert ids.tolist() == ours[:, 1].tolist()
    given[1] = torch.zeros_like(slots)
    for row in range(0, rows, 50):  # alone, and so in another place
        part = slice(row, row + 1)
        marks = (None, None) if seen is None or bias is None else (seen[part], bias[part])
        feed = marked_feed(marks[0], marks[1], 1, vocab_size)
        alone = feed.choose(*(each[part].cuda() for each in given))
        assert alone.tolist() == [ours[row].tolist()]


def marked_feed(
    seen: torch.Tensor | None, bias: torch.Tensor | None, slots: int, vocab_size: int
) -> TokenFeed:
    """Return a feed on a GPU whose slots have seen these ids and have this bias, (slots, V)."""
    feed = TokenFeed(slots, torch.device("cuda"), vocab=range(vocab_size))
    if seen is not None and bias is not None:
        for slot in range(slots):
            ids = np.flatnonzero(seen[slot].numpy())
            feed.mark(slot, ids, np.arange(vocab_size), bias[slot].numpy())
    return feed


def test_tokens_that_a_gpu_has_chosen_are_penalised():
    rows, vocab_size = 64, 20_011
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)).round(
        decimals=1
    )
    slots, nothing = torch.arange(rows), torch.full((rows,), -1)
    draws = torch.tensor([[1.0, 1, 1, 0, 0, 1]]).repeat(rows, 1)
    penalties = torch.tensor([[0.0, 0, 0], [1.3, 0, 0], [1.0, 0.3, 0.4]])[torch.arange(rows) % 3]
    feeds = [
        TokenFeed(rows, torch.device(device), vocab=range(vocab_size)) for device in ("cpu", "cuda")
    ]
    for step in range(12):
        if step in (0, 8):  # other rows take the slots
            for feed, slot in itertools.product(feeds, range(rows)):
                best = np.array([int(logits[slot].argmax())])
                feed.mark(slot, np.array([slot, 7]), best, np.array([-np.inf], np.float32))
        expected, ours = (
            feed.choose(
                *(each.to(device, copy=True) for each in (logits, slots, nothing, draws, penalties))
            )
            for feed, device in zip(feeds, ("cpu", "cuda"), strict=True)
        )
        assert ours.tolist() == expected.tolist()
    assert len(set(ours[1::3, 1].tolist())) > 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_usable_logits_are_seen_among_drawn_ones(bad):
    logits = torch.randn(9, 20_000)
    logits[2:4, 11_111] = bad
    logits[4] = bad
    draws = torch.tensor([[1, 0, 0.9, 0, 0, 0.5], [1, 5, 0.9, 0, 0, 0.5], [1, 1, 1, 0, 0, 1]])
    slots, nothing = torch.arange(9).cuda(), torch.full((9,), -1).cuda()
    chosen = TokenFeed(9, torch.device("cuda"), vocab=range(20_000)).choose(
        logits.cuda(), slots, nothing, draws.repeat(3, 1).cuda()
    )
    spoilt = {4} if bad == -float("inf") else {2, 3, 4}
    finite = chosen[:, 0].contiguous().view(torch.float32).isfinite().tolist()
    assert finite == [row not in spoilt for row in range(9)]
    assert 0 <= int(chosen[:, 1].min()) <= int(chosen[:, 1].max()) < 20_000


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sampled_tokens_equal_those_of_the_cpu(name, tmp_path):
    """The host draws on a CPU, the GPU in steps that overlap; neighbours change nothing."""
    ft_dir = write_random(*MODELS[name], tmp_path)
    kinds: list[dict[str, Any]] = [
        {"top_k": 4},
        {"top_k": 0, "top_p": 0.8, "temperature": 0.7, "min_length": 9},
        {},
        {"top_k": 20, "top_p": 0.5},
        {"repetition_penalty": 1.4},
        {"top_k": 4, "presence_penalty": 0.4, "bad_words": ((5,), (17,))},
        {"top_k": 0, "top_p": 0.9, "repetition_penalty": 1.2, "min_length": 9},
    ]
    rows = []
    for number in range(64):
        ids = tuple((7 * number + 3 * t) % 50 for t in range(1 + number % 9))
        options = SamplingParams(end_id=52, random_seed=number, **kinds[number % 7])
        rows.append(SequenceRequest(ids, 24, options, context_ids=ids, returned_ids=ids))
    together = GenerationRequest(tuple(rows), padded_len=9)
    scored = replace(rows[0], options=replace(rows[0].options, return_log_probs=True))
    with (
        Engine(ft_dir, Placement(device="cpu")) as cpu,
        Engine(ft_dir, Placement(device="cuda"), options=EngineOptions(max_lanes=64)) as cuda,
    ):
        expected = [row.output_ids for row in cpu.generate(together).rows]
        assert [row.output_ids for row in cuda.generate(together).rows] == expected
        for number in (0, 1, 3, 4, 5, 6):
            alone = cuda.generate(GenerationRequest((rows[number],), padded_len=9))
            assert alone.rows[0].output_ids == expected[number]
        # A row whose logits the host needs takes the whole step's to the host.
        mixed = GenerationRequest((scored, *rows[1:8]), padded_len=9)
        assert [row.output_ids for row in cuda.generate(mixed).rows] == expected[:8]


def test_a_stopped_engine_gives_its_memory_back(tmp_path):
    ft_dir = write_random(*MODELS[next(iter(MODELS))], tmp_path)
    # In a process of its own: engines of other tests would keep the workspaces of cuBLAS.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        kept = pool.submit(_memory_after_engines, ft_dir).result()
    assert max(kept) < 4 << 20


def test_graphs_of_all_sizes_share_the_memory_of_the_largest():
    # In a process of its own, where nothing else is kept.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(_memory_of_graphs, 40).result() < 3 * (64 << 20)


def _memory_of_graphs(count: int) -> int:
    """Return the bytes that graphs of up to 64 MiB take together."""
    x = torch.ones(64 << 18, device="cuda")

    class Sums(SizedGraphs):
        def _record(self, size: int, pool: Any) -> Graph:
            graph, _ = record_graph(lambda: (x[: size << 18] + 1).sum(), x.device, pool)
            return Graph(graph)

    before = torch.cuda.memory_reserved()
    graphs = Sums(range(64 - count, 65), "sums")
    graphs.record()
    torch.cuda.empty_cache()
    assert graphs.holding(1) is not None
    assert graphs.holding(65) is None
    return torch.cuda.memory_reserved() - before


class Graph(NamedTuple):
    """A graph without inputs."""

    graph: torch.cuda.CUDAGraph


def _memory_after_engines(ft_dir: Path) -> list[int]:
    """Return the bytes of tensors on the GPU after one engine, and after another."""
    kept = []
    for _ in range(2):
        with Engine(ft_dir, Placement(device="cuda", data_type="fp16")) as engine:
            engine.generate(make_request([20]))
            assert torch.cuda.memory_allocated() > engine.capacity.cache_bytes
        kept.append(torch.cuda.memory_allocated())
    return kept
