"""T5 and BERT on a GPU give what they give on a CPU."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export_scripts.families.bert import BERT, BertConfig
from inference.decoding.rows import GenerationRequest
from inference.engine.encoder_engine import EncoderEngine
from inference.engine.encoding import parse_encoding
from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests import contract
from tests.conversions import folder_of
from tests.ft_folders import write_random
from tests.looks import relative_error
from tests.rank_threads import logits_by
from tests.tiny_t5 import BARE, TinyT5, t5_tensors, write_t5
from tests.tiny_t5_tuning import adapter_tensors, ia3_scalers, write_adapter, write_ia3

pytestmark = pytest.mark.gpu

# Relative to the largest value: order of sums; 20 units of fp16's 2**-11 and 25 of bf16's 2**-8,
# the rounding of the numbers between the products of the layers.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-1}
MODELS = {
    "absolute": TinyT5(),
    "gated": TinyT5(activation="geglu"),
    "relative": TinyT5(relative=True),
    "bare": BARE,
}
PROMPT = (5, 9, 2, 38, 17, 11, 23)
ANSWER = (2, 30, 8, 19, 4, 27)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")


def t5_folder(path: Path, model: TinyT5, tp_size: int = 1) -> Path:
    path.mkdir(exist_ok=True)
    source = write_t5(path / "t5.nemo", t5_tensors(model), model)
    tuned: dict[str, Any] = {
        "ia3_checkpoints": tuple(
            write_ia3(path / f"{n}.nemo", ia3_scalers(model, seed=n), model) for n in range(2)
        ),
        "adapter_checkpoints": (write_adapter(path / "a.nemo", adapter_tensors(model), model),),
    }
    return folder_of(source, path / "out", tp_size=tp_size, **tuned)


# Unscaled scores of random weights amplify rounding beyond any tolerance.
HALF = [(name, kind) for name, model in MODELS.items() for kind in TOLERANCE if model.bias]


@pytest.mark.parametrize(("name", "data_type"), [*HALF, ("bare", "fp32")])
@pytest.mark.parametrize("task", [None, 1])
def test_t5_logits_equal_those_of_the_cpu(name, data_type, task, tmp_path):
    model = MODELS[name]
    folder = t5_folder(tmp_path, model)
    options: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"data_type": data_type}}
    expected, ours = (
        logits_by(
            folder, PROMPT, ANSWER, vocab_size=model.vocab_size, task=task, device=device, **more
        )
        for device, more in options.items()
    )
    assert relative_error(ours, expected) < TOLERANCE[data_type]


def request_of(
    engine: Engine, count: int, *, output_len: int = 15, **options: float
) -> GenerationRequest:
    prompts = [[4 + (7 * row + 3 * t) % 36 for t in range(1 + 2 * row)] for row in range(count)]
    return contract.request_of(engine, prompts, output_len, **options)


@pytest.mark.parametrize("name", MODELS)
def test_t5_tokens_of_mixed_batches_and_beams_equal_those_of_the_cpu(name, tmp_path):
    folder = t5_folder(tmp_path, MODELS[name])
    options = EngineOptions(max_lanes=6)
    with (
        Engine(folder, Placement(device="cpu"), options=options) as cpu,
        Engine(folder, Placement(device="cuda"), options=options) as cuda,
    ):
        for more in ({}, {"ia3_tasks": 1}, {"beam_width": 3}, {"repetition_penalty": 1.4}):
            request = request_of(cpu, 9, **more)
            expected, rows = cpu.generate(request).rows, cuda.generate(request).rows
            assert [row.output_ids for row in rows] == [row.output_ids for row in expected]


def test_t5_tokens_of_requests_that_arrive_while_others_run_equal_those_of_the_cpu(tmp_path):
    """Few blocks: rows share steps, join them late, and are preempted and computed again."""
    model = MODELS["relative"]
    folder = t5_folder(tmp_path, model)
    block_bytes = 16 * 2 * model.decoder_layers * model.inner * 4
    few = EngineOptions(
        max_lanes=6, max_seq_len=64, kv_block_tokens=16, kv_cache_bytes=14 * block_bytes
    )
    with (
        Engine(folder, Placement(device="cpu"), options=EngineOptions(max_seq_len=64)) as cpu,
        Engine(folder, Placement(device="cuda"), options=few) as cuda,
    ):
        assert cuda.capacity.tokens == 13 * 16
        kinds = [
            {},
            {"ia3_tasks": 1},
            {"runtime_top_k": 4},
            {"beam_width": 2},
        ]
        requests = [
            request_of(cpu, 1 + number % 5, output_len=9 + 5 * (number % 7), **kinds[number % 4])
            for number in range(24)
        ]
        futures = []
        for request in requests:
            futures.append(cuda.submit(request))
            time.sleep(0.005)
        for request, future in zip(requests, futures, strict=True):
            expected, rows = cpu.generate(request).rows, future.result(60).rows
            assert [row.output_ids for row in rows] == [row.output_ids for row in expected]


@pytest.mark.parametrize("data_type", TOLERANCE)
def test_t5_encoder_output_and_attentions_equal_those_of_the_cpu(data_type, tmp_path):
    folder = t5_folder(tmp_path, MODELS["relative"])
    tensors = {
        "input_ids": np.array([PROMPT, (*PROMPT[:3], 0, 0, 0, 0)], np.uint32),
        "sequence_length": np.array([[7], [3]], np.uint32),
    }
    with_weights = tensors | {"is_return_attentions": np.array([[True], [True]])}
    with (
        EncoderEngine(folder, Placement(device="cpu")) as cpu,
        EncoderEngine(folder, Placement(device="cuda", data_type=data_type)) as cuda,
    ):
        expected = cpu.encode(parse_encoding(with_weights, cpu.architecture))
        ours = cuda.encode(parse_encoding(with_weights, cuda.architecture))
        plain = cuda.encode(parse_encoding(tensors, cuda.architecture))
    assert relative_error(ours.hidden, expected.hidden) < TOLERANCE[data_type]
    assert relative_error(plain.hidden, expected.hidden) < TOLERANCE[data_type]
    assert ours.attentions is not None
    assert expected.attentions is not None
    assert relative_error(ours.attentions, expected.attentions) < TOLERANCE[data_type]


@pytest.mark.parametrize("data_type", TOLERANCE)
@pytest.mark.parametrize(
    "lengths", [(9, 2, 5), (1,) * 60, (70, 1, 64)], ids=["few", "many", "long"]
)
def test_bert_equals_the_cpu(data_type, lengths, tmp_path):
    config = BertConfig(
        model_name="bert",
        weight_data_type="fp32",
        head_num=4,
        size_per_head=8,
        inter_size=56,
        num_layer=3,
    )
    folder = write_random(BERT, config, tmp_path)
    shape = (len(lengths), max(lengths), 32)
    states = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensors = {
        "input_hidden_state": states,
        "sequence_lengths": np.array(lengths, np.int32)[:, None],
    }
    with (
        EncoderEngine(folder, Placement(device="cpu")) as cpu,
        EncoderEngine(folder, Placement(device="cuda", data_type=data_type)) as cuda,
    ):
        expected = cpu.encode(parse_encoding(tensors, cpu.architecture)).hidden
        ours = cuda.encode(parse_encoding(tensors, cuda.architecture)).hidden
    assert relative_error(ours, expected) < TOLERANCE[data_type]
