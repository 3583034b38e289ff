"""Configurations for NVIDIA's C++ backend, read by a real tritonserver that lacks that backend.

The server checks a configuration before it looks for the backend, so that the complaint about the
backend is its approval of everything else.
"""

import re
from typing import Any

import pytest

from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.server.log import ServerStartError
from tests.ft_folders import unpack_case
from tests.integration.triton_process import new_server

pytestmark = pytest.mark.triton

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt": ("gpt_nemo/train_tp2_pp1_fp32", 2, {"max_queue_delay_us": 50_000}),
    "gpt_streaming": ("gpt_nemo/train_tp2_pp1_fp32", 2, {"decoupled": True}),
    "gpt_interactive": (
        "gpt_nemo/train_tp2_pp1_fp32",
        2,
        {"interactive": True, "max_batch_size": 1},
    ),
    "gptj": ("gptj_hf/tiny", 1, {"instance_count": 2}),
    "gptneox": ("gptneox/parallel_residual", 2, {"decoupled": True}),
    "t5": ("t5_nemo/train_tp2_pp1_relative_geglu_nobias", 1, {}),
    "t5_of_whole": ("t5/relu_tied", 1, {"model_type": "T5-Encoder"}),
    "t5_encoder": ("t5_encoder/from_full_t5", 1, {}),
    "bert": ("bert/tiny", 1, {"data_type": "bf16"}),
}


def test_server_finds_nothing_wrong_but_the_absent_backend(shared, tmp_path):
    repository = tmp_path / "repository"
    for name, (case, tp_size, options) in CASES.items():
        model_dir = repository / name
        unpack_case(shared / "golden" / case, model_dir / "1", tp_size=tp_size)
        settings = {"ensemble": False, "max_batch_size": 8, "data_type": "fp16", **options}
        request = RepositoryRequest(
            model_dir=model_dir, tp_size=tp_size, engine="fastertransformer", pp_size=1, **settings
        )
        assert build_repository(request) == [model_dir]
    # The server complains about a wrong configuration before it looks for the backend.
    (repository / "wrong" / "1").mkdir(parents=True)
    wrong = 'name: "wrong" backend: "fastertransformer" nonsense: 8'
    (repository / "wrong" / "config.pbtxt").write_text(wrong)
    with pytest.raises(ServerStartError):
        new_server(repository, tmp_path, has_nvidia_backend=True).start(timeout_s=240)
    complaint = r"failed to load '(\w+)' version 1: .*unable to find backend library for backend 'f"
    log = (tmp_path / "server.log").read_text()
    assert set(re.findall(complaint, log)) == set(CASES)
