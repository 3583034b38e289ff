"""`action=watch` with one server for all checkpoints of a run, which is killed in between."""

import json
import os
import signal
from typing import Any

from tests.integration.command import FREE_PORTS, finish, processes_of, start
from tests.tiny_text_gpt2 import write_tiny_gpt2
from tests.waiting import until

STEPS = (10, 20, 30)


def test_each_checkpoint_has_its_own_figures_though_they_share_a_server_that_dies(
    tmp_path,
):
    for step in STEPS:
        folder = write_tiny_gpt2(tmp_path / "run" / f"checkpoint-{step}", seed=step, positions=512)
        (folder / "trainer_state.json").touch()
    common = [
        "export=gpt3/sample", f"base_results_dir={tmp_path}/results",
        "export.model.tensor_model_parallel_size=1", "evaluate.limit=2",
        "export.triton_deployment.parameters.device=cpu", "evaluate.latency.enabled=false",
        "evaluate.lambada.metrics=[lambada_perplexity]",
    ]  # fmt: skip
    command = start(
        "action=watch", f"export.run.training_dir={tmp_path}/run", "watch.settle_s=0",
        "watch.poll_s=0.1", "watch.idle_s=0", "watch.exchange=true", "watch.retries=3",
        "evaluate.retry_s=0", *common,
    )  # fmt: skip
    folder = tmp_path / "results" / "gpt_books_5m" / "watch_tp1_pp1_fp16_fp32"

    def state(step: int) -> str:
        path = folder / "watch.json"
        found = json.loads(path.read_text())["watched"] if path.is_file() else []
        return next((str(each["state"]) for each in found if each["step"] == step), "")

    until(lambda: state(10) == "evaluated", "the first figures", limit_s=200)
    running = processes_of(folder)
    for process in [
        each for each, command in running.items() if "inference.host.__main__" in command
    ]:
        os.kill(process, signal.SIGKILL)
    text = finish(command, timeout_s=400)
    assert command.returncode == 0, text
    watched: list[dict[str, Any]] = json.loads((folder / "watch.json").read_text())["watched"]
    assert [each["state"] for each in watched] == ["evaluated"] * 3
    figures = [each["metrics"]["lambada_perplexity"]["value"] for each in watched]
    assert len(set(figures)) == 3
    alone = start(
        "stages=[evaluate]", f"export.model.checkpoint_path={tmp_path}/run/checkpoint-{STEPS[2]}",
        f"export.run.results_dir={tmp_path}/alone", *common, *FREE_PORTS,
    )  # fmt: skip
    text = finish(alone, timeout_s=200)
    assert alone.returncode == 0, text
    (task,) = json.loads((tmp_path / "alone/results/evaluate/report.json").read_text())["tasks"]
    assert [metric["value"] for metric in task["metrics"]] == figures[2:]
