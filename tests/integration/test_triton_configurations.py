"""Configurations for NVIDIA's C++ backend, read by a real tritonserver that lacks that backend.

The server checks a configuration before it looks for the backend, so that the complaint about the
backend is its approval of everything else.
"""

from __future__ import annotations

from pathlib import Path
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


def _complaint(repository: Path, log_folder: Path) -> str:
    """Return why a server that has NVIDIA's backends alone does not serve a repository."""
    server = new_server(repository, log_folder, is_nvidias=True)
    with pytest.raises(ServerStartError) as caught:
        server.start(timeout_s=240)
    return "\n".join(caught.value.log_tail)


@pytest.mark.parametrize("name", CASES)
def test_server_finds_nothing_wrong_but_the_absent_backend(
    shared: Path, tmp_path: Path, name: str
) -> None:
    case, tp_size, options = CASES[name]
    model_dir = tmp_path / "repository" / name
    unpack_case(shared / "golden" / case, model_dir / "1", tp_size=tp_size)
    settings = {"ensemble": False, "max_batch_size": 8, "data_type": "fp16", **options}
    request = RepositoryRequest(
        model_dir=model_dir, tp_size=tp_size, engine="fastertransformer", pp_size=1, **settings
    )
    assert build_repository(request) == [model_dir]
    assert "unable to find backend library for backend 'fastertransformer'" in _complaint(
        model_dir.parent, tmp_path
    )


def test_server_would_have_complained_about_the_configuration_first(tmp_path: Path) -> None:
    folder = tmp_path / "repository" / "wrong"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('name: "wrong" backend: "fastertransformer" nonsense: 8')
    assert "unable to find backend library" not in _complaint(folder.parent, tmp_path)
