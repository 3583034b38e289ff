"""FT shards made by NVIDIA's converters, run by our runtime, give the original model's logits."""

from pathlib import Path

import numpy as np
import pytest
import torch

from inference.decoding.request import parse_request
from inference.engine.engine import Engine
from inference.ranks.settings import Placement
from tests.conftest import SAMPLE_MODEL, material
from tests.conversions import folder_of
from tests.engine_logits import prompt_logits
from tests.ft_folders import unpack_case
from tests.json_files import read_json
from tests.looks import relative_error
from tests.rank_threads import logits_of

# Relative to the largest logit. fp32: another order of summation. fp16: weights rounded to 11 bits.
FP32_TOLERANCE = 1e-4
FP16_TOLERANCE = 1e-2

# family/case and the largest TP its recorded folders are for.
CASES = {
    "gpt_nemo/train_tp1_pp1_bf16": 2,
    "gpt_nemo/train_tp2_pp2_fp16": 2,
    "gpt2/tiny": 4,
    "gpt2/n_inner": 1,
    "opt/pre_ln": 2,
    "opt/post_ln_projected": 1,
    "bloom/tiny": 4,
    "bloom/bin_sharded": 1,
    "gpt_megatron/v3_tp2_pp2": 1,
    "gpt_megatron/v0_tp1": 1,
}


def golden(name: str) -> Path:
    return material("golden", name)


def relative_difference(logits: torch.Tensor, case: Path) -> float:
    return relative_error(logits, np.load(case / "logits.npy"))


def prompt_of(case: Path) -> list[int]:
    return read_json(case / "greedy.json")["prompt"]


def greedy(engine: Engine, prompt: list[int], length: int) -> list[int]:
    request = parse_request(
        {
            "input_ids": np.array([prompt], np.uint32),
            "input_lengths": np.array([[len(prompt)]], np.uint32),
            "request_output_len": np.array([[length]], np.uint32),
        },
        limits=engine.limits,
    )
    return list(engine.generate(request).rows[0].output_ids[0])


def check_greedy(engine: Engine, case: Path) -> None:
    recorded = read_json(case / "greedy.json")
    expected = recorded["continuation"]
    # A continuation past the end token was recorded, but an answer ends there.
    if engine.limits.end_id in expected:
        expected = expected[: expected.index(engine.limits.end_id) + 1]
    assert min(recorded["top1_minus_top2"]) > 1e-3, "the recorded margins are within tolerance"
    assert greedy(engine, recorded["prompt"], len(recorded["continuation"])) == expected


@pytest.mark.parametrize("name", CASES)
def test_one_rank_gives_recorded_logits_and_tokens(name, tmp_path):
    case = golden(name)
    with Engine(unpack_case(case, tmp_path, tp_size=1), Placement(device="cpu")) as engine:
        prompt = prompt_of(case)
        assert relative_difference(prompt_logits(engine, prompt), case) < FP32_TOLERANCE
        check_greedy(engine, case)


@pytest.mark.parametrize("name", ["gpt2/tiny", "bloom/tiny", "opt/pre_ln"])
def test_half_precision_weights_stay_close(name, tmp_path):
    case = golden(name)
    ft_dir = unpack_case(case, tmp_path, tp_size=2, data_type="fp16")
    prompt = prompt_of(case)
    logits = logits_of(ft_dir, prompt, tp_size=2, pp_size=1, data_type="fp16")
    assert relative_difference(logits, case) < FP16_TOLERANCE


@pytest.mark.parametrize(
    ("tp_size", "pp_size"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_ranks_in_processes_give_recorded_logits_and_tokens(tp_size, pp_size, tmp_path):
    case = golden("gpt2/tiny")
    ft_dir = unpack_case(case, tmp_path, tp_size=tp_size)
    with Engine(ft_dir, Placement(tp_size=tp_size, pp_size=pp_size, device="cpu")) as engine:
        prompt = prompt_of(case)
        assert relative_difference(prompt_logits(engine, prompt), case) < FP32_TOLERANCE
        check_greedy(engine, case)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name, largest in CASES.items() if largest == 4])
def test_every_grid_of_ranks_gives_recorded_logits(name, tp_size, pp_size, tmp_path):
    case = golden(name)
    prompt = prompt_of(case)
    ft_dir = unpack_case(case, tmp_path, tp_size=tp_size)
    logits = logits_of(ft_dir, prompt, tp_size=tp_size, pp_size=pp_size)
    assert relative_difference(logits, case) < FP32_TOLERANCE


def test_a_prompt_in_chunks_has_the_same_logits(tmp_path):
    case = golden("bloom/tiny")
    prompt = prompt_of(case)
    ft_dir = unpack_case(case, tmp_path, tp_size=2)
    chunks = (1, 3, len(prompt) - 4)
    logits = logits_of(ft_dir, prompt, tp_size=2, pp_size=2, chunks=chunks)
    assert relative_difference(logits, case) < FP32_TOLERANCE


CONVERTED = [
    "gpt2/tiny",
    "opt/pre_ln",
    "opt/post_ln_projected",
    "bloom/tiny",
    "gpt_nemo/train_tp2_pp1_fp32",
    "gpt_megatron/v3_tp2_pp1",
    "gpt_mcore/gpt_tp2",
    "gptj_hf/tiny",
    "gptneox/parallel_residual",
    "gptneox/sequential_residual",
    "gpt_mcore/llama_tp1",
]


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_checkpoint_gives_recorded_logits(name, tp_size, pp_size, tmp_path):
    case = golden(name)
    facts = read_json(case / "case.json")
    folder_of(case / facts["source"], tmp_path, tp_size=tp_size)
    prompt = prompt_of(case)
    logits = logits_of(tmp_path / f"{tp_size}-gpu", prompt, tp_size=tp_size, pp_size=pp_size)
    assert relative_difference(logits, case) < FP32_TOLERANCE


def test_sample_model_gives_recorded_logits_and_tokens(tmp_path):
    sample = material("sample_model")
    folder_of(SAMPLE_MODEL, tmp_path, weight_data_type="fp16")
    with Engine(tmp_path / "1-gpu", Placement(device="cpu")) as engine:
        for number, recorded in enumerate(read_json(sample / "greedy.json")):
            prompt, whole = recorded["input_ids"], recorded["greedy_output_ids"]
            reference = np.load(sample / f"logits_{number}.npy")
            assert relative_error(prompt_logits(engine, prompt), reference) < FP32_TOLERANCE
            expected = whole[len(prompt) :]
            assert greedy(engine, prompt, len(expected)) == expected
