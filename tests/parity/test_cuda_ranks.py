"""Ranks on several GPUs, talking over NCCL, give the tokens of one process on a CPU."""

from dataclasses import replace

import pytest
import torch

from inference.engine.engine import Engine
from inference.engine.options import EngineOptions
from inference.ranks.settings import Placement
from tests.ft_folders import write_random
from tests.parity.test_cuda import MODELS, make_request
from tests.parity.test_cuda_encoders import MODELS as T5_MODELS
from tests.parity.test_cuda_encoders import request_of, t5_folder

pytestmark = pytest.mark.gpu


def _needs_gpus(count: int) -> None:
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"{count} CUDA devices are needed, {found} are visible")


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2)])
# Not GPT-NeoX: its shards hold biases divided by TP, so that one seed gives other models.
@pytest.mark.parametrize("name", ["gpt", "bloom", "gptj", "llama"])
def test_tokens_over_several_gpus_equal_those_of_the_cpu(name, tp_size, pp_size, tmp_path):
    _needs_gpus(tp_size * pp_size)
    family, config = MODELS[name][0], replace(MODELS[name][1], num_layer=2)
    whole = write_random(family, config, tmp_path / "whole")
    parts = write_random(family, replace(config, tensor_para_size=tp_size), tmp_path / "parts")
    options = EngineOptions(max_lanes=6)
    with (
        Engine(whole, Placement(device="cpu"), options=options) as cpu,
        Engine(
            parts, Placement(device="cuda", tp_size=tp_size, pp_size=pp_size), options=options
        ) as cuda,
    ):
        requests = [make_request([3, 20, 7, 11, 1, 30, 5, 9]), make_request([12, 9], 3)]
        sampled = [
            replace(
                row,
                options=replace(
                    row.options,
                    return_log_probs=False,
                    top_k=5 * (n % 2),
                    top_p=0.9,
                    random_seed=n,
                    repetition_penalty=1 + n % 3 / 4,
                ),
            )
            for n, row in enumerate(requests[0].rows)
        ]
        for request in (*requests, replace(requests[0], rows=tuple(sampled))):
            expected, rows = cpu.generate(request).rows, cuda.generate(request).rows
            assert [row.output_ids for row in rows] == [row.output_ids for row in expected]


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_t5_tokens_over_two_gpus_equal_those_of_the_cpu(tp_size, pp_size, tmp_path):
    _needs_gpus(2)
    whole = t5_folder(tmp_path / "whole", T5_MODELS["relative"])
    parts = t5_folder(tmp_path / "parts", T5_MODELS["relative"], tp_size)
    options = EngineOptions(max_lanes=6)
    with (
        Engine(whole, Placement(device="cpu"), options=options) as cpu,
        Engine(
            parts, Placement(device="cuda", tp_size=tp_size, pp_size=pp_size), options=options
        ) as cuda,
    ):
        for more in ({}, {"ia3_tasks": 1}):
            request = request_of(cpu, 9, **more)
            expected, rows = cpu.generate(request).rows, cuda.generate(request).rows
            assert [row.output_ids for row in rows] == [row.output_ids for row in expected]
