"""A server that is not ours as `deploy.engine`: `transformers serve`, asked by the evaluation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.integration.command import finish, start
from tests.openai_servers import write_served_model

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
