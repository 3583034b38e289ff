"""Servers that are not ours as `deploy.engine`, asked by the evaluation.

`transformers serve` is always there. vLLM needs an environment of its own: SLIPWAY_VLLM names the
`vllm` command of one, such as that of the CPU build with the torch of requirements/torch.txt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.integration.command import finish, start
from tests.openai_servers import write_served_model

VLLM = os.environ.get("SLIPWAY_VLLM", "")
TRANSFORMERS = Path(sys.executable).with_name("transformers")


def test_transformers_serves_and_is_evaluated(tmp_path: Path) -> None:
    model = write_served_model(tmp_path / "model")
    command = [str(TRANSFORMERS), "serve", "'{model}'", "--host", "'{host}'", "--port", "'{port}'"]
    words = ",".join((*command, "--device", "cpu"))
    run = start(
        "export=gpt3/sample",
        "stages=[deploy,evaluate]",
        f"base_results_dir={tmp_path}/results",
        "deploy.engine=openai",
        f"deploy.command=[{words}]",
        f"deploy.repository={model}",
        "deploy.http_port=0",
        "evaluate.tasks=[lambada]",
        "evaluate.gate={}",
        "evaluate.baseline=none",
        "evaluate.limit=3",
        "evaluate.latency.shapes=[8+4]",
        "evaluate.latency.requests=2",
        f"evaluate.lambada.data_path={ROOT}/examples/passages.jsonl",
        environment={"HF_HUB_OFFLINE": "1"},
    )
    text = finish(run)
    assert run.returncode == 0, text
    assert "serving OpenAI on http://127.0.0.1:" in text
    (path,) = (tmp_path / "results").glob("**/evaluate/report.json")
    report = json.loads(path.read_text())
    (task,) = report["tasks"]
    assert [metric["name"] for metric in task["metrics"]] == ["lambada_last_word"]
    assert "lambada_perplexity is left out: the server returns no log probabilities" in task["note"]
    assert "lambada_last_token is left out: the server takes no token ids" in task["note"]
    assert {point["streamed"] for point in report["latency"]} == {True}


@pytest.mark.skipif(not VLLM, reason="SLIPWAY_VLLM names no vllm command")
def test_vllm_answers_as_the_model_of_a_nemo_archive(tmp_path: Path) -> None:
    run = start(
        "export=gpt3/sample",
        "stages=[convert,deploy,evaluate]",
        f"base_results_dir={tmp_path}",
        "convert.format=huggingface",
        "deploy.engine=vllm",
        f"deploy.executable={VLLM}",
        "deploy.http_port=0",
        "deploy.vllm.max_model_len=512",
        "export.model.tensor_model_parallel_size=1",
        environment={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    text = finish(run, timeout_s=600)
    assert run.returncode == 0, text
    assert text.count("equals the reference on all 64 samples") == 2
    assert "samples within" in text
