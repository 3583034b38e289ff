"""Configurations for NVIDIA's C++ backend, read by a real tritonserver that lacks that backend.

The server checks a configuration before it looks for the backend, so that the complaint about the
backend is its approval of everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from export_scripts.triton.repository import RepositoryRequest, build_repository
from inference.ports import FREE_PORTS
from inference.server.installation import find_triton
from inference.server.server import TritonServer
from tests.ft_folders import unpack_case
from tests.integration.triton_process import DOUBLE, add_model

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


class _WithoutOwnBackends(TritonServer):
    """Finds only the backends of the installed server."""

    def _command(self) -> tuple[list[str], dict[str, str]]:
        folder = find_triton(own_backends=False).backend_directory
        command, environment = super()._command()
        return [*command, f"--backend-directory={folder}"], environment


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = add_model(tmp_path_factory.mktemp("repository"), "double", DOUBLE)
    with _WithoutOwnBackends(
        repository,
        ports=FREE_PORTS,
        log_path=tmp_path_factory.mktemp("log") / "triton.log",
    ) as running:
        running.start(timeout_s=240)
        yield running


def _load(server: TritonServer, name: str) -> str:
    """Ask the server as its owner to load a model and return its complaint."""
    client = InferenceServerClient(server.control_address)
    with pytest.raises(InferenceServerException) as caught:
        client.load_model(name)
    client.close()
    return str(caught.value.message())


@pytest.mark.parametrize("name", CASES)
def test_server_finds_nothing_wrong_but_the_absent_backend(
    shared: Path, server: TritonServer, name: str
) -> None:
    case, tp_size, options = CASES[name]
    model_dir = Path(server.model_repository) / name
    unpack_case(shared / "golden" / case, model_dir / "1", tp_size=tp_size)
    settings = {"ensemble": False, "max_batch_size": 8, "data_type": "fp16", **options}
    request = RepositoryRequest(
        model_dir=model_dir, tp_size=tp_size, engine="fastertransformer", pp_size=1, **settings
    )
    assert build_repository(request) == [model_dir]
    assert "unable to find backend library for backend 'fastertransformer'" in _load(server, name)


def test_server_would_have_complained_about_the_configuration_first(server: TritonServer) -> None:
    folder = Path(server.model_repository) / "wrong"
    (folder / "1").mkdir(parents=True)
    text = 'name: "wrong" backend: "fastertransformer" max_batch_size: 8'
    (folder / "config.pbtxt").write_text(text + " input { name: 'x' dims: [ 0 ] }")
    assert _load(server, "wrong") == "failed to load 'wrong', failed to poll from model repository"
