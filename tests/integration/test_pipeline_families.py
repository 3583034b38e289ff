"""Checkpoints through the command: convert, export, deploy, and a request.

The other families are served in test_triton_families.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.server.client import TritonClient
from tests.contract import tensors_of
from tests.integration.command import FREE_PORTS, served

pytestmark = pytest.mark.triton

# case below the golden folder: (configuration, export.run.model_type, tensor-parallel size)
GENERATORS = {
    "t5/v1_1_gated_gelu_untied": ("mt5/export_mt5", "mt5", 1),
    "gptj_hf/tiny": ("gpt3/export_gpt3", "gptj", 2),
}
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


def sure_tokens(recorded: Any) -> list[int]:
    """Return the recorded tokens before the first whose lead over the next is too small."""
    margins = recorded["top1_minus_top2"]
    count = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
    tokens: list[int] = recorded["continuation"][:count]
    assert tokens
    return tokens


@pytest.mark.long  # BERT goes the same way
@pytest.mark.parametrize("case", GENERATORS)
def test_generating_checkpoint_is_converted_and_served(
    shared: Path, tmp_path: Path, case: str
) -> None:
    choice = GENERATORS[case]
    recorded = json.loads((shared / "golden" / case / "greedy.json").read_text())
    prompt, expected = recorded["prompt"], sure_tokens(recorded)
    has_encoder = "t5" in choice[1]
    request = tensors_of([prompt], len(expected), model="T5" if has_encoder else "GPT")
    command = words(shared, case, tmp_path, choice)
    command.append("export.triton_deployment.ensemble=false")  # the source has no tokenizer
    with served(folder_of(tmp_path, choice), *command) as endpoint:
        assert (endpoint["model"], endpoint["ensemble"]) == ("tiny", None)
        with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=240) as client:
            outputs = client.infer("tiny", request)
    answer = expected if has_encoder else prompt + expected
    assert outputs["output_ids"][0, 0, : len(answer)].tolist() == answer


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
