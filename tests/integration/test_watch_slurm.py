"""`action=watch` during a training run, with its pipelines on a real Slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.integration.slurm_runs import CLUSTER
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.triton, pytest.mark.usefixtures("reachable")]
SAMPLE = ROOT / "examples" / "gpt_books_5m" / "gpt_books_5m.nemo"


@pytest.mark.soak
@pytest.mark.parametrize("exchange", [pytest.param(False, marks=pytest.mark.long), True])
def test_checkpoints_that_appear_during_training_are_evaluated_in_order(
    tmp_path,
    slurm_cluster,
    soak,
    request,
    exchange,
):
    steps = range(30, 30 + 10 * min(soak, 50), 10)
    run, base = tmp_path / "run" / "checkpoints", tmp_path / "results"
    run.mkdir(parents=True)
    state = base / "gpt_books_5m" / "watch_tp1_pp1_fp16_fp32" / "watch.json"

    def arrive(step: int) -> None:
        """Write a checkpoint as a trainer does: marked until it is whole."""
        marker = run / f"gpt--step={step}-unfinished"
        marker.touch()
        shutil.copyfile(SAMPLE, run / f"gpt--step={step}.nemo")
        marker.unlink()

    def start() -> subprocess.Popen[str]:
        command = [
            sys.executable, "main.py", "action=watch", "export=gpt3/sample", *CLUSTER,
            f"base_results_dir={base}", f"export.run.training_dir={run.parent}",
            "export.model.tensor_model_parallel_size=1", f"watch.until_step={steps[-1]}",
            "watch.settle_s=0.5", "watch.poll_s=0.2", "evaluate.limit=4",
            "evaluate.latency.enabled=false", "evaluate.lambada.metrics=[lambada_last_token]",
            "evaluate.gate.lambada_last_token='no drop of more than 1 point at 95 %'",
            f"watch.exchange={exchange}", *["deploy.server=slipway"] * exchange,
        ]  # fmt: skip
        started = subprocess.Popen(
            command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        request.addfinalizer(started.kill)
        return started

    def watched() -> dict[int, dict[str, Any]]:
        if not state.exists():
            return {}
        return {each["step"]: each for each in json.loads(state.read_text())["watched"]}

    def is_at(step: int, state: str) -> bool:
        return watched().get(step, {}).get("state") == state

    arrive(10)
    (run / "gpt--step=20-unfinished").touch()  # training was killed while it wrote this one
    (run / "gpt--step=20.nemo").write_bytes(SAMPLE.read_bytes()[:100_000])
    first = start()
    until(partial(is_at, 10, "running"), "the first pipeline")
    first.send_signal(signal.SIGINT)  # its jobs stay in the queue
    text, _ = first.communicate(timeout=60)
    assert first.returncode == 130, text

    second = start()
    until(lambda: watched()[10]["state"] == "evaluated", "the first result", limit_s=180)
    for step in steps:
        arrive(step)
        if step != steps[-1]:
            until(partial(is_at, step, "running"), "its pipeline")
            second.kill()
            second.wait()
            second = start()
        until(partial(is_at, step, "evaluated"), f"the result of step {step}", limit_s=180)
    assert watched()[20]["problem"] == "it lacks the removal of gpt--step=20-unfinished"
    (run / "gpt--step=20.nemo").unlink()
    text, _ = second.communicate(timeout=60)
    assert second.returncode == 0, text
    assert [each["state"] for each in watched().values()] == [
        *("evaluated", "gone"),
        *["evaluated"] * len(steps),
    ]
    assert [each["attempts"] for each in watched().values()] == [1, 0, *[1] * len(steps)]
    assert "not distinguished from step 10" in watched()[30]["verdict"]
    assert "insufficient for no drop of more than 1 point" in watched()[30]["problem"]
    page = (state.parent / "watch.html").read_text()
    assert "evaluated, best" in page
    assert "step_0000010/results/evaluate/report.html" in page
    assert json.loads((state.parent / "best.json").read_text())["step"] == 10
    until(lambda: not slurm_cluster.run("squeue", "-h").strip(), "the end of every job")
    assert len(list(base.rglob("1-gpu"))) == 1  # of the best; the other's repository is deleted
