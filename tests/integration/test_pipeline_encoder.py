"""An encoder through the command: convert, export, deploy, and a request."""

import numpy as np
import pytest

from inference.server.client import TritonClient
from tests.integration.command import FREE_PORTS, served

pytestmark = pytest.mark.triton


@pytest.mark.long  # BERT is served in test_triton_families, and a GPT goes this way
def test_encoder_checkpoint_is_converted_and_served(shared, tmp_path):
    golden = shared / "golden" / "bert" / "tiny"
    # Neither text models nor a word about them: BERT takes hidden states.
    states = np.load(golden / "input_hidden_state.npy").astype(np.float32)[None]
    expected = np.load(golden / "output_hidden_state.npy")
    request = {
        "input_hidden_state": states,
        "sequence_lengths": np.array([[states.shape[1]]], np.int32),
    }
    words = [
        "stages=[convert,export,deploy]",
        "export=gpt3/export_gpt3",
        f"base_results_dir={tmp_path}",
        "export.run.model_train_name=tiny",
        "export.run.model_type=bert",
        f"export.model.checkpoint_path={golden / 'source'}",
        "export.model.tensor_model_parallel_size=2",
        "export.model.weight_data_type=fp32",
        "export.model.processes=1",
        "export.triton_deployment.data_type=fp32",
        "export.triton_deployment.max_batch_size=4",
        *FREE_PORTS,
    ]
    with served(tmp_path / "tiny" / "export_tp2_pp1_fp32_fp32", *words) as endpoint:
        assert (endpoint["model"], endpoint["ensemble"]) == ("tiny", None)
        with TritonClient(f"127.0.0.1:{endpoint['grpc']}", timeout_s=240) as client:
            hidden = client.infer("tiny", request)["output_hidden_state"]
    # fp32 on both sides; what remains is the order of sums.
    np.testing.assert_allclose(hidden[0], expected, atol=1e-3)
