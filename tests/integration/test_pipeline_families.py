"""Checkpoints through the command: convert, export, deploy, and a request.

The other families are served in test_triton_families.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference.server.client import TritonClient
from tests.integration.command import FREE_PORTS, served

pytestmark = pytest.mark.triton
BERT = ("gpt3/export_gpt3", "bert", 2)


def words(shared: Path, case: str, results: Path, choice: tuple[str, str, int]) -> list[str]:
    export, model_type, tp_size = choice
    return [
        "stages=[convert,export,deploy]",
        f"export={export}",
        f"base_results_dir={results}",
        "export.run.model_train_name=tiny",
        f"export.run.model_type={model_type}",
        f"export.model.checkpoint_path={shared / 'golden' / case / 'source'}",
        f"export.model.tensor_model_parallel_size={tp_size}",
        "export.model.weight_data_type=fp32",
        "export.model.processes=1",
        "export.triton_deployment.data_type=fp32",
        "export.triton_deployment.max_batch_size=4",
        *FREE_PORTS,
    ]


def folder_of(results: Path, choice: tuple[str, str, int]) -> Path:
    kind = "export" if choice[0].startswith("gpt3") else "export_from_convert"
    return results / "tiny" / f"{kind}_tp{choice[2]}_pp1_fp32_fp32"


def test_encoder_checkpoint_is_converted_and_served(shared: Path, tmp_path: Path) -> None:
    golden = shared / "golden" / "bert" / "tiny"
    # Neither text models nor a word about them: BERT takes hidden states.
    states = np.load(golden / "input_hidden_state.npy").astype(np.float32)[None]
    expected = np.load(golden / "output_hidden_state.npy")
    request = {
        "input_hidden_state": states,
        "sequence_lengths": np.array([[states.shape[1]]], np.int32),
    }
    with served(folder_of(tmp_path, BERT), *words(shared, "bert/tiny", tmp_path, BERT)) as endpoint:
        assert (endpoint["model"], endpoint["ensemble"]) == ("tiny", None)
        with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=240) as client:
            hidden = client.infer("tiny", request)["output_hidden_state"]
    # fp32 on both sides; what remains is the order of sums.
    np.testing.assert_allclose(hidden[0], expected, atol=1e-3)
